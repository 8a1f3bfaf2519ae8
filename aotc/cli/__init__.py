"""The command line. One file a command; each imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from typing import Any, NoReturn

from aotc import __version__, knobs
from aotc.errors import AotcError

COMMANDS = {
    "compile": "turn a model into an artifact (needs no GPU)",
    "run": "answer one prompt with an artifact",
    "serve": "serve an artifact over OpenAI's API",
    "inspect": "show what is in an artifact: programs, kernels, memory, bytes moved",
    "verify": "check an artifact against its interpreter and its source",
    "tune": "measure schedules of CUDA kernels on the GPU that is here",
    "bench": "measure start-up or latency of an artifact, or a server under load",
}

_EPILOG = """examples:
  aotc compile SmolLM2-135M-Instruct.gguf --arch cpu -o chat/
  aotc run chat/ --prompt "What is gravity?"
  aotc serve chat/ --port 8000
"""


_EXTRAS = {
    "torch": "compile", "triton": "compile", "ml_dtypes": "compile", "onnx": "compile", "cuda": "cuda",
    "starlette": "serve", "uvicorn": "serve", "httptools": "serve", "prometheus_client": "serve", "matplotlib": "bench",
}  # fmt: skip
"""The extra of pyproject.toml that installs a module."""


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; each command's module adds its own arguments, or that of `only` does, 10 ms sooner."""
    top = _Parser(
        "aotc", description="Ahead-of-time compiler and runtime for deep-learning inference.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"aotc {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if only not in (None, name):
            commands.add_parser(name, help=text)
            continue
        module = importlib.import_module(f"aotc.cli.{name}_command")
        sub = commands.add_parser(name, help=text, description=module.__doc__, formatter_class=_Formatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


class _Parser(argparse.ArgumentParser):
    """Of commands too. Flags are not shortened: a shorter one would change its meaning with the next release."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aotc: error: {_line(message)} (see `{self.prog} --help`)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, 2 for an error of the user's, 70 for a device that failed at work,
    130 for an interrupt."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # here, where a full disk is still reported
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        _drop_output()
        return 0
    except (AotcError, OSError, MemoryError, ModuleNotFoundError) as error:
        print(f"aotc: error: {_explain(error)}", file=sys.stderr)
        _drop_output()
        return error.exit_code if isinstance(error, AotcError) else 2


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:  # without the parsers of all commands
        print(f"aotc {__version__}")
        return 0
    options = parser(arguments[0] if arguments and arguments[0] in COMMANDS else None).parse_args(arguments)
    logging.basicConfig(level=(knobs.log_level() or "warning").upper(), format="%(name)s: %(message)s")
    return options.run(options) or 0


def _explain(error: Exception) -> str:
    """What is wrong and what to do, in a line. Raises the error again where it is a fault of ours."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise error
        return f"{package} is not installed: pip install 'aotc[{_EXTRAS[package]}]'"
    if isinstance(error, MemoryError):
        return _line(f"out of memory: {error}" if str(error) else "out of memory")
    if isinstance(error, OSError):
        where = "the output" if error.filename is None else error.filename
        return _line(f"cannot read or write {where}: {error.strerror or error}")
    return _line(str(error))


def _line(text: str) -> str:
    return " ".join(text.split())


def _drop_output() -> None:
    """Drops what cannot be written: the interpreter would try again at its end, and fail with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
