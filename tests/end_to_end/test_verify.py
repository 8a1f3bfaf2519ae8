"""`aotc verify` runs every kernel of an artifact against the interpreter, and the whole against its source."""

import json

import numpy as np
import pytest
import torch

import aotc
from aotc import harness
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.frontend.checkpoint import open_checkpoint
from aotc.frontend.decoder import trace_decoder
from aotc.verifier import verify_artifact


@pytest.fixture(scope="module")
def llm(tmp_path_factory, tiny_config):
    """(artifact's folder, source's folder) of a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "config.json").write_text(json.dumps(tiny_config))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "cpu", "--max-num-seqs", "2"]
    assert main([*arguments, "--max-num-batched-tokens", "16", "-o", str(folder / "artifact"), "--quiet"]) == 0
    return folder / "artifact", folder


def test_a_language_model_and_its_source_agree(llm, capsys):
    artifact, source = llm
    assert main(["verify", str(artifact)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(open_artifact(artifact).cpu_target().programs)
    assert all(line.startswith("ok   ") for line in lines)
    length = open_artifact(artifact).manifest.model.max_model_len
    model = trace_decoder(open_checkpoint(str(source), weights="random:7"), "f32", length)
    *_, against = verify_artifact(open_artifact(artifact), model)
    assert against.name.startswith("against") and against.fault is None


def test_other_weights_are_another_model(llm):
    artifact, source = llm
    length = open_artifact(artifact).manifest.model.max_model_len
    model = trace_decoder(open_checkpoint(str(source), weights="random:8"), "f32", length)
    *_, against = verify_artifact(open_artifact(artifact), model)
    assert against.fault is not None and against.fault.startswith("logits differ by")


def test_a_difference_names_the_kernel_and_its_source(llm, monkeypatch, capsys):
    monkeypatch.setattr(harness, "TOLERANCE", dict.fromkeys(harness.TOLERANCE, 1e-9))
    assert main(["verify", str(llm[0])]) == 2
    out, err = capsys.readouterr()
    assert "FAIL" in out and "differs by" in out and "model.layers.0" in out
    assert err.count("\n") == 1 and "checks" in err


def test_a_tensor_model(tmp_path, capsys):
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    aotc.compile(torch.export.export(module, (torch.zeros(2, 6),)), tmp_path / "artifact")
    assert main(["verify", str(tmp_path / "artifact")]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["ok  ", "ok  "]


def test_a_damaged_weight_is_named(llm, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(llm[0], copy)
    data = np.fromfile(copy / "weights.bin", np.uint8)
    data[len(data) // 2] ^= 1
    data.tofile(copy / "weights.bin")
    assert main(["verify", str(copy)]) == 2
    assert "weights.bin is damaged at" in capsys.readouterr().err
