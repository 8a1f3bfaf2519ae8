"""The command line. One file a command; each imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys

from aotc import __version__, knobs
from aotc.errors import AotcError

COMMANDS = {
    "compile": "turn a model into an artifact (needs no GPU)",
    "run": "answer one prompt with an artifact",
    "serve": "serve an artifact over OpenAI's API",
    "inspect": "show what is in an artifact: programs, kernels, memory, bytes moved",
    "verify": "check an artifact against its interpreter and its source",
    "bench": "measure start-up or latency of an artifact",
}

_EPILOG = """examples:
  aotc compile SmolLM2-135M-Instruct.gguf --arch cpu -o chat/
  aotc run chat/ --prompt "What is gravity?"
  aotc serve chat/ --port 8000
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each command's module adds its own arguments."""
    top = argparse.ArgumentParser(
        "aotc", description="Ahead-of-time compiler and runtime for deep-learning inference.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"aotc {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"aotc.cli.{name}_command")
        sub = commands.add_parser(name, help=text, description=module.__doc__, formatter_class=_Formatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, 2 for an error of the user's, 130 for an interrupt."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"aotc {__version__}")
        return 0
    options = parser().parse_args(arguments)
    try:
        logging.basicConfig(level=(knobs.log_level() or "warning").upper(), format="%(name)s: %(message)s")
        return options.run(options) or 0
    except AotcError as error:
        print(f"aotc: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
