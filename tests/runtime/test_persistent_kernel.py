"""`aotc compile --persistent-kernel on`: linear layers between two attentions are one kernel, which computes what they did,
on GPUs with fewer multiprocessors than it has blocks too."""

import json

import numpy as np
import pytest
from cuda_cases import sequence
from interpreted_cuda import InterpretedDriver

from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.cuda_replay import CudaReplay
from aotc.harness import relative_error
from aotc.ir.interpret import interpret
from aotc.ir.text import parse_graph
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.sequence import Row
from aotc.verifier import decoder_inputs, weight_reader

CONFIG = {
    "num_hidden_layers": 1, "vocab_size": 48, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
"""A layer of whole blocks of 64, of which phases are made."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, tiny_config):
    """compiled(*options) -> an artifact for sm90, with programs for 1 and 2 rows and for 16 tokens."""
    folder = tmp_path_factory.mktemp("persistent")
    (folder / "config.json").write_text(json.dumps({**tiny_config, **CONFIG}))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "sm90", "--dtype", "bf16", "--quiet"]
    arguments += ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--kv-layout", "static"]

    def make(*options):
        output = folder / "-".join(["artifact", *options])
        assert main([*arguments, *options, "-o", str(output)]) == 0
        return open_artifact(output)

    return make


@pytest.fixture(scope="module")
def artifact(compiled):
    return compiled("--persistent-kernel", "on")


def plans(artifact):
    (target,) = artifact.manifest.targets
    return {e.name: artifact.plan(e.plan) for e in target.programs}


def chains(plan):
    return [k for k in plan.kernels if k.family == "chain"]


def test_layers_after_attention_are_one_kernel(artifact):
    """Those of a prompt's step too, of 16 tokens; for one row there are none."""
    found = {name: [plan.kernels[c.kernel].family for c in plan.calls()] for name, plan in plans(artifact).items()}
    assert found["decode_2"][-4:] == ["matmul", "attention_decode", "chain", "sample"]
    assert "chain" in found["extend_16"] and "chain" not in found["decode_1"]
    for plan in plans(artifact).values():
        assert all(k.meta["together"] and k.symbol.startswith("chain") for k in chains(plan))
        assert not any("together" in k.meta for k in plan.kernels if k.family != "chain")


@pytest.mark.parametrize("options", [(), ("--persistent-kernel", "auto"), ("--persistent-kernel", "off")])
def test_without_being_asked_for_there_are_none(compiled, options):
    found = plans(compiled(*options)).values()
    assert not any(chains(p) or any("together" in k.meta for k in p.kernels) for p in found)


def test_plans_replayed_give_the_interpreters_logits(artifact):
    (target,) = artifact.manifest.targets
    graph = parse_graph(artifact.read("graphs/cuda/decode_2.ir").decode())
    inputs = decoder_inputs(graph, rows=2, each=1, start=5)
    expected = interpret(graph, {k: v.copy() for k, v in inputs.items()}, weight_reader(artifact))
    got = CudaReplay(artifact, target).run("decode_2", inputs, {"rows": 2, "tokens": 2, "slots": 2})
    for name in ("logits", "kv.0"):
        assert relative_error(got[name], expected[name]) < 2e-2, name
    np.testing.assert_array_equal(got["token"], expected["token"])


def test_fewer_multiprocessors_than_blocks_give_the_same_bits(artifact, use_driver):
    def step(multiprocessors):
        driver = use_driver(InterpretedDriver(artifact))
        driver.multiprocessors = multiprocessors
        executor = CudaExecutor(artifact, 2, CudaDevice())
        rows = [sequence(5, slot=0), sequence(9, slot=1)]
        for row in rows:
            executor.start(row)
        executor.step([Row(row, 0, 1, True) for row in rows])
        (blocks,) = (n.gridDimX for n in driver.graphs[driver.launched[-1]] if n.func.startswith("chain"))
        logits = executor.logits(2)
        executor.close()
        return blocks, logits

    (blocks, expected), (fewer, got) = step(132), step(3)
    assert blocks > 3 == fewer
    np.testing.assert_array_equal(got, expected)


def test_commands_read_such_an_artifact(artifact, capsys):
    assert main(["inspect", str(artifact.path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["decode_2"])
    assert line.split()[1] == str(len(list(plans(artifact)["decode_2"].calls())))
    assert main(["verify", str(artifact.path)]) == 2
    out, err = capsys.readouterr()
    assert out == "ok   checksums\n" and "was compiled for sm90" in err and err.count("\n") == 1, "there is no CPU's part"
