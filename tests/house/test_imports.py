"""What loads, runs and serves an artifact works where the compiler's packages are not installed."""

import json
import textwrap

import pytest

BLOCKED = ("torch", "triton", "onnx", "transformers", "sympy", "ml_dtypes", "huggingface_hub")

# Any import of these fails as where they are not installed.
BLOCK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def blocked(process):
    """blocked(script, *arguments): what a script says where the packages are absent."""

    def call(script, *arguments):
        return process(*arguments, program=("-c", BLOCK + textwrap.dedent(script)))

    return call


def test_the_block_works(blocked):
    for name in BLOCKED:
        assert f"No module named '{name}'" in blocked(f"import {name}").err


def test_every_module_of_the_runtime_is_imported(blocked):
    answer = blocked("""
        import importlib, pkgutil
        import aotc, aotc.artifact, aotc.cli, aotc.runtime
        for package in (aotc.artifact, aotc.cli, aotc.runtime):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
        aotc.load
        ours = {name.split(".")[1] for name in sys.modules if name.startswith("aotc.")}
        print(*sorted(ours))
    """)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.split() == ["artifact", "cli", "errors", "knobs", "runtime", "target"]


def test_a_tensor_model_runs(blocked, repo_root):
    kept = repo_root / "tests/end_to_end/artifact_format_1"
    answer = blocked(
        """
        import aotc, numpy as np
        model = aotc.load(sys.argv[1])
        y = model(x=np.linspace(-1, 1, 2 * 6, dtype=np.float32).reshape(2, 6))["output"]
        np.testing.assert_allclose(y, np.load(sys.argv[1] + ".npy"), rtol=1e-5, atol=1e-6)
        print(y.shape)
        """,
        kept,
    )
    assert (answer.code, answer.out, answer.err) == (0, "(2, 3)\n", "")


COMMAND_LINE = """
from aotc.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["", "compile", "run", "serve", "inspect", "verify", "bench"])
def test_help(blocked, command):
    answer = blocked(COMMAND_LINE, *filter(None, [command]), "--help")
    assert (answer.code, answer.err) == (0, "") and answer.out.startswith(f"usage: aotc {command}")


def test_commands_that_need_no_compiler(blocked, made_artifact):
    assert blocked(COMMAND_LINE, "--version").out.startswith("aotc ")
    shown = blocked(COMMAND_LINE, "inspect", "--json", made_artifact)
    assert (shown.code, shown.err) == (0, "") and json.loads(shown.out)["model"]["family"] == "llama"
    too_long = blocked(COMMAND_LINE, "run", made_artifact, "--prompt", "w5 " * 16)
    too_long.refuses("the prompt has 16 tokens")  # by the engine, behind the tokenizer and the library


@pytest.mark.parametrize("source", ["checkpoint", "onnx"])
def test_compile_names_what_is_missing(blocked, made_checkpoint, onnx_files, tmp_path, source):
    model = made_checkpoint if source == "checkpoint" else onnx_files[0]
    answer = blocked(COMMAND_LINE, "compile", model, "--arch", "x86-64-v3", "--quiet", "-o", tmp_path / "a")
    answer.refuses("is not installed: pip install 'aotc[compile]'")
    assert list(tmp_path.iterdir()) == []


def test_serve_names_what_is_missing(process, made_artifact):
    for name in ("uvicorn", "starlette", "httptools", "prometheus_client"):
        script = f"import sys; sys.modules[{name!r}] = None\n{COMMAND_LINE}"
        process("serve", made_artifact, program=("-c", script)).refuses(f"{name} is not installed: pip install 'aotc[serve]'")
