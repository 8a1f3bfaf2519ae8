"""Artifacts that were damaged, edited or made for another machine, and requests that do not fit: what commands say."""

import json
import os
import shutil
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import msgspec
import pytest

from aotc.artifact.manifest import FORMAT_VERSION, File, decode_manifest, encode_manifest
from aotc.target import CPU_TARGETS

LEVEL = "x86-64-v3"
WHOLE = "the kernel library has no"
"""What `run` says of the whole artifact, whose kernels are another model's: all checks are behind it by then."""
COMMANDS = {
    "run": ["run", "--prompt", "w5 w6 w7"], "verify": ["verify"], "bench": ["bench", "latency", "--repeat", "1"],
    "serve": ["serve", "--port", "0"], "inspect": ["inspect"],
}  # fmt: skip


@pytest.fixture
def artifact(made_artifact, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made_artifact, tmp_path / "artifact"))


@pytest.fixture
def refused(cli):
    """refused(command, artifact, *parts): a command that must be refused, in a line with these parts."""

    def call(command: str, artifact: Path, *parts: str, out: str = "") -> None:
        name, *rest = COMMANDS[command]
        before = sorted(artifact.parent.rglob("*"))
        cli(name, *rest, artifact).refuses(*parts, out=out)
        assert sorted(artifact.parent.rglob("*")) == before

    return call


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def reseal(artifact: Path, **changes) -> None:
    """Edits the manifest the way an attacker would: with a hash that fits."""
    old = decode_manifest((artifact / "manifest.json").read_bytes())
    (artifact / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(old, **changes)))


def test_the_whole_artifact_is_accepted(cli, refused, artifact):
    refused("run", artifact, WHOLE, "compile the model again")
    assert cli("inspect", artifact).code == 0
    assert json.loads(cli("inspect", "--json", artifact).out)["model"]["max_model_len"] == 16


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(
    ("name", "say"),
    [
        (f"plans/{LEVEL}/extend_4.json", "is damaged (wrong checksum): compile the model again or copy it again"),
        (f"kernels/{LEVEL}/kernels.so", "is damaged (wrong checksum): compile the model again or copy it again"),
        ("tokenizer.json", "is damaged (wrong checksum): compile the model again or copy it again"),
        ("weights.bin", "is damaged at"),
    ],
)
def test_a_flipped_bit(refused, artifact, command, name, say):
    path = artifact / name
    for at in (0, path.stat().st_size // 2, -1):
        flip(path, at)
        refused(command, artifact, str(path), say)
        flip(path, at)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cut_file(refused, artifact, command):
    reads_weights = command in ("run", "verify", "bench")
    path = artifact / ("weights.bin" if reads_weights else f"plans/{LEVEL}/decode_1.json")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(command, artifact, f"{path} has {size - 1} bytes, the manifest says {size}: copy")
    path.unlink()
    refused(command, artifact, f"{path} is missing: copy the artifact again")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_edited_manifest(refused, artifact, command):
    path = artifact / "manifest.json"
    whole = path.read_text()
    edited = whole.replace('"max_model_len": 16', '"max_model_len": 32')
    assert edited != whole
    path.write_text(edited)
    refused(command, artifact, "manifest.json was changed after it was written: compile the model again")
    path.write_text(whole.replace(f'"format_version": {FORMAT_VERSION}', f'"format_version": {FORMAT_VERSION + 1}'))
    refused(command, artifact, f"has format version {FORMAT_VERSION + 1}, this aotc reads {FORMAT_VERSION}: compile")
    path.write_text(whole[:-9])
    refused(command, artifact, "manifest.json is malformed")
    path.unlink()
    refused(command, artifact, "has no manifest.json: it is no artifact, or its compile did not finish")
    shutil.rmtree(artifact)
    refused(command, artifact, f"is no folder: compile a model into it with `aotc compile MODEL -o {artifact}`")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_leaves_the_folder(refused, artifact, tmp_path, command):
    (tmp_path / "secret").write_bytes(b"secret")
    files = decode_manifest((artifact / "manifest.json").read_bytes()).files
    for name in ("../secret", "/etc/passwd", "plans/../../secret"):
        reseal(artifact, files={**files, name: File(6, "0" * 64)})
        refused(command, artifact, f"'{name}' leaves the artifact")
    reseal(artifact, files=files)
    (artifact / "tokenizer.json").unlink()
    (artifact / "tokenizer.json").symlink_to(tmp_path / "secret")
    refused(command, artifact, "'tokenizer.json' leaves the artifact or is no file")


@pytest.mark.parametrize("command", ["run", "bench", "verify"])
def test_another_cpu_level(refused, artifact, monkeypatch, command):
    v3, out = CPU_TARGETS[0].features, "ok   checksums\n" if command == "verify" else ""
    monkeypatch.setattr("aotc.target.cpu_features", lambda: v3 - {"avx2"})
    refused(command, artifact, f"was compiled for {LEVEL}; this CPU is older than x86-64-v3: compile", out=out)
    monkeypatch.setattr("aotc.target.cpu_features", lambda: v3)
    (target,) = decode_manifest((artifact / "manifest.json").read_bytes()).targets
    reseal(artifact, targets=(msgspec.structs.replace(target, name="x86-64-v4-amx"),))
    say = "was compiled for x86-64-v4-amx; this CPU is x86-64-v3: compile it with --arch x86-64-v3"
    refused(command, artifact, say, out=out)


# Requests


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--prompt", "w5 " * 16], "the prompt has 16 tokens; the model was compiled for 16"),
        (["--prompt", "w5 " * 1000], "the prompt has 1000 tokens; the model was compiled for 16"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "w5", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "w5", "--temperature", "-1"], "temperature"),
        (["--prompt", "w5", "--temperature", "nan"], "temperature"),
        (["--prompt", "w5", "--top-p", "1.5"], "top_p"),
        (["--prompt", "w5", "--top-k", "-3"], "top_k"),
        (["--prompt", "w5", "--max-tokens", "many"], "--max-tokens"),
        (["--prompt", "\udcff"], "lone surrogate"),
        ([], "required: --prompt"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_request_that_does_not_fit(cli, made_artifact, options, part, form):
    cli("run", made_artifact, *options, *form).refuses(part)


def test_the_prompt_on_standard_input(cli, made_artifact, monkeypatch):
    for data, part in ((b"w5 " * 20, "the prompt has 20 tokens"), (b"w5 \xff", "no UTF-8 at byte 3")):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(data)))
        cli("run", made_artifact, "--prompt", "-").refuses(part)


def test_commands_for_other_models(cli, artifact, repo_root):
    kept = repo_root / "tests/end_to_end/artifact_format_1"
    cli("run", kept, "--prompt", "x").refuses("is no language model: call it from Python with aotc.load(...)(...)")
    cli("serve", kept).refuses("is no language model with a tokenizer: serve needs one")
    cli("bench", "latency", kept).refuses("is no language model")
    cli("bench", "latency", artifact).refuses("latency decodes 64 tokens: compile with --max-model-len 66 or more")
    cli("bench", "startup", kept, "--repeat", "1").refuses("is no language model")
    cli("verify", artifact, "--against", "m.gguf").refuses("there is no file m.gguf: check the path")
