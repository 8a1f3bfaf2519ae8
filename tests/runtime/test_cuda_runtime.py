"""The CUDA runtime over a driver that records: what is allocated, uploaded, built and launched, and what is refused."""

import importlib
import json
import shutil

import numpy as np
import pytest
from fake_cuda import FakeDriver

from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.errors import ArtifactError, DeviceError
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row, Sequence


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "config.json").write_text(json.dumps(tiny_config))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "sm80,sm90", "--max-num-seqs", "1", "--dtype", "bf16"]
    assert main([*arguments, "--max-num-batched-tokens", "16", "-o", str(folder / "artifact"), "--quiet"]) == 0
    return open_artifact(folder / "artifact")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(**options) -> (the device, its driver)."""
    real = importlib.import_module

    def make(**options):
        driver = FakeDriver(**options)
        monkeypatch.setattr(importlib, "import_module", lambda n: driver if n == "cuda.bindings.driver" else real(n))
        return CudaDevice(), driver

    return make


def sequence(*tokens, **settings):
    params = SamplingParams(temperature=0, **settings)
    made = Sequence(Request("s", tokens, params), 0, list(tokens))
    made.bias = params.bias_arrays() if params.logit_bias else None
    return made


def test_weights_arrive_whole_and_a_step_is_one_graph(artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(artifact, 1, device)
    weights = np.ctypeslib.as_array(driver.blocks[executor._weights])
    np.testing.assert_array_equal(weights[: artifact.manifest.weights_bytes], artifact.map_weights())
    prompt = sequence(5, 6, 7)
    executor.start(prompt)
    history = np.ctypeslib.as_array(driver.blocks[executor._state])[executor._history :].view(np.int32)
    assert history[:3].tolist() == [5, 6, 7]
    executor.step([Row(prompt, 0, 3, True)])
    assert len(driver.launched) == 1
    plan = artifact.plan(next(p.plan for p in executor.target.programs if p.kind == "extend"))
    assert len(driver.graphs[driver.launched[0]]) == len(list(plan.calls()))
    assert set(driver.edges) == {(1, 1)}, "kernels of sm90 wait themselves"
    step = np.ctypeslib.as_array(driver.blocks[executor._step])
    assert step[executor.inputs.fields["tokens"][0] :].view(np.int32)[:3].tolist() == [5, 6, 7]
    dims = step[executor._dims_at :].view(np.int32)
    assert dict(zip(executor.target.dims, dims.tolist(), strict=False)) == {"rows": 1, "slots": 1, "tokens": 3}


def test_kernels_of_older_cards_wait_for_nothing_themselves(artifact, gpu):
    device, driver = gpu(capability=(8, 6))
    executor = CudaExecutor(artifact, 1, device)
    assert executor.target.name == "sm80"
    executor.warm()
    assert set(driver.edges) == {(0, 0)}


def test_biases_lie_in_memory_that_the_gpu_reads(artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(artifact, 1, device)
    biased = sequence(5, logit_bias={3: 1.5, 9: -2.0})
    executor.start(biased)
    assert biased.bias[0].tolist() == [3, 9] and biased.bias[1].tolist() == [1.5, -2.0]
    place = biased.bias[0].ctypes.data
    assert any(at <= place < at + len(block) for at, block in driver.blocks.items())


def test_memory_is_exact_and_refused_before_anything_is_copied(artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(artifact, 1, device)
    parts = (executor._weights, executor._arena, executor._state, executor._counters, executor._step, executor._logits)
    taken = sum(len(driver.blocks[p]) for p in (*parts, executor._results))
    assert executor.memory.total <= taken <= executor.memory.total + 256 * 7  # least size of an allocation
    device, driver = gpu(free=1000)
    with pytest.raises(DeviceError, match=r"needs 0.00 GB on the GPU and 0.00 GB are free"):
        CudaExecutor(artifact, 1, device)
    assert not driver.blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gpus": 0}, "finds no GPU"), ({"version": 11080}, "is for CUDA 11.8: at least 12.0 is needed")],
)
def test_what_is_missing_is_said(gpu, options, message):
    with pytest.raises(DeviceError, match=message):
        gpu(**options)


def test_another_architecture_is_refused_with_what_is_inside(artifact, gpu):
    device, _ = gpu(capability=(12, 0))
    with pytest.raises(ArtifactError, match=r"compiled for sm80, sm90; this GPU is sm120 .*--arch sm120"):
        device.target_of(artifact)


def test_damaged_weights_are_named(artifact, gpu, tmp_path):
    shutil.copytree(artifact.path, tmp_path / "copy")
    data = np.fromfile(tmp_path / "copy" / "weights.bin", np.uint8)
    data[100] ^= 1
    data.tofile(tmp_path / "copy" / "weights.bin")
    with pytest.raises(ArtifactError, match="weights.bin is damaged at"):
        CudaExecutor(open_artifact(tmp_path / "copy"), 1, gpu()[0])


def test_a_failing_step_is_an_error_not_an_answer(artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(artifact, 1, device)
    prompt = sequence(5)
    executor.start(prompt)
    driver.failing = "cuStreamSynchronize"
    with pytest.raises(DeviceError, match="CUDA_ERROR_FAKE in cuStreamSynchronize"):
        executor.step([Row(prompt, 0, 1, True)])
