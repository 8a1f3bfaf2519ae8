"""Artifacts for NVIDIA GPUs, compiled and replayed on a machine without one."""

import json
from pathlib import Path

import numpy as np
import pytest

from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.codegen.cuda.limits import LIMITS
from aotc.cuda_replay import CudaReplay
from aotc.errors import DeviceError, RequestError
from aotc.harness import relative_error
from aotc.ir.interpret import interpret
from aotc.ir.text import parse_graph
from aotc.runtime.executor import CpuExecutor, open_executor
from aotc.verifier import decoder_inputs, weight_reader


@pytest.fixture(scope="module", params=["f32", "bf16"])
def artifact(request, tmp_path_factory, tiny_config):
    """A tiny Llama with 9 heads over 3, compiled for two GPU architectures and this CPU in one artifact."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(tiny_config))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "sm80,sm90,cpu", "--dtype", request.param]
    arguments += ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--kv-page-size", "16", "--quiet"]
    arguments += ["-o", str(folder / "artifact")]
    assert main(arguments) == 0
    return open_artifact(folder / "artifact")


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_plans_replayed_on_a_fake_device_give_the_interpreters_logits(artifact, arch):
    target = next(t for t in artifact.manifest.targets if t.name == arch)
    replay, weights = CudaReplay(artifact, target), weight_reader(artifact)
    limit = 1e-4 if artifact.manifest.model.dtype == "f32" else 2e-2
    cases = (("decode_2", 2, 1, 5), ("decode_1", 1, 1, 9), ("extend_16", 2, 6, 0))
    for program, rows, each, start in (*cases, ("paged_decode_2", 2, 1, 20), ("paged_extend_16", 2, 6, 13)):
        graph = parse_graph(artifact.read(f"graphs/cuda/{program}.ir").decode())
        inputs = decoder_inputs(graph, rows, each, start)
        dims = {"rows": rows, "tokens": rows * each, "slots": rows, "pages": len(inputs["kv.0"])}
        expected = interpret(graph, {k: v.copy() for k, v in inputs.items()}, weights)
        got = replay.run(program, inputs, dims)
        assert relative_error(got["logits"], expected["logits"]) < limit, program
        np.testing.assert_array_equal(got["token"], expected["token"])
        for name in ("kv.0", "kv.1"):
            assert relative_error(got[name], expected[name]) < limit, (program, name)


def test_cubins_fit_their_architectures(artifact):
    for target in artifact.manifest.targets:
        if target.device != "cuda":
            continue
        for entry in target.programs:
            for kernel in artifact.plan(entry.plan).kernels:
                assert artifact.read(kernel.meta["cubin"])[:4] == b"\x7fELF"
                assert kernel.meta["shared"] <= LIMITS[target.name].shared_bytes
                assert kernel.meta["registers"] <= 255 and kernel.meta["spill_bytes"] <= 256


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_without_a_driver_the_cpu_answers_or_one_line_says_so(artifact):
    assert isinstance(open_executor(artifact, 1), CpuExecutor)
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        open_executor(artifact, 1, "cuda")
    with pytest.raises(RequestError, match="auto, cpu, cuda"):
        open_executor(artifact, 1, "tpu")


def test_devices_share_weights(artifact):
    """One artifact for three targets holds each tensor once, but for the CPU's layout of matmul weights."""
    names = [w.name for w in artifact.manifest.weights]
    assert len(names) == len(set(names))
    dense = sum(w.nbytes for w in artifact.manifest.weights if w.packing is None)
    assert artifact.manifest.weights_bytes < 2.5 * dense
