"""A text encoder for NVIDIA GPUs: attention is spelt out there. Compiled and replayed on a machine without one."""

import json

import numpy as np

from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.cuda_replay import CudaReplay
from aotc.harness import relative_error
from aotc.ir.interpret import interpret
from aotc.ir.text import parse_graph
from aotc.verifier import weight_reader

CONFIG = {
    "model_type": "bert", "vocab_size": 40, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 3, "max_position_embeddings": 24,
}  # fmt: skip


def test_plans_replayed_on_a_fake_device_give_the_interpreters_vectors(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    arguments = ["compile", str(tmp_path), "--weights", "random:3", "--arch", "sm80"]
    assert main([*arguments, "--max-num-seqs", "4", "-o", str(tmp_path / "artifact"), "--quiet"]) == 0
    artifact = open_artifact(tmp_path / "artifact")
    (target,) = artifact.manifest.targets
    graph = parse_graph(artifact.read("graphs/cuda/embed.ir").decode())
    ids = np.random.default_rng(0).integers(0, 40, (3, 7), np.int32)
    inputs = {"input_ids": ids, "lengths": np.array([7, 1, 4], np.int32)}
    expected = interpret(graph, inputs, weight_reader(artifact))["embeddings"]
    got = CudaReplay(artifact, target).run("embed", inputs, {"batch": 3, "length": 7})["embeddings"]
    assert relative_error(got, expected) < 1e-5
