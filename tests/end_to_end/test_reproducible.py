"""The same compile twice gives the same bytes, and artifacts of older releases keep loading."""

import json
from pathlib import Path

import numpy as np

import aotc
from aotc.cli import main

KEPT = Path(__file__).parent / "artifact_format_1"


def compile_tiny(config, folder, output):
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["compile", str(folder), "--weights", "random:3", "--arch", "x86-64-v3,x86-64-v4-bf16,sm90"]
    arguments += ["--dtype", "bf16", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "-o", str(output)]
    assert main([*arguments, "--quiet"]) == 0


def test_same_bytes_twice(tmp_path, monkeypatch, tiny_config):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("AOTC_CACHE", str(tmp_path / f"cache_{name}"))  # nothing is taken from an earlier build
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "model").mkdir()
        compile_tiny(tiny_config, tmp_path / name / "model", tmp_path / name / "artifact")
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n / "artifact").rglob("*")) for n in "ab"]
    assert files[0] == files[1]
    for path in files[0]:
        if (tmp_path / "a" / path).is_file():
            assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path


def test_artifact_of_format_1_still_loads():
    """Made by the first release; it must load and say what it said for as long as format 1 is read."""
    model = aotc.load(KEPT)
    x = np.linspace(-1, 1, 2 * 6, dtype=np.float32).reshape(2, 6)
    expected = np.load(KEPT.with_suffix(".npy"))
    np.testing.assert_allclose(model(x=x)["output"], expected, rtol=1e-5, atol=1e-6)
