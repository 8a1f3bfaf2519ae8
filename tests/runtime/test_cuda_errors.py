"""What can be wrong with a GPU, each said in one line; and steps that fail, of which nothing is used."""

import asyncio
import logging
import re

import pytest
from cuda_cases import sequence

import aotc
from aotc.cli import main
from aotc.errors import ArtifactError, DeviceError, DeviceLostError, RequestError
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.engine import Engine
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row
from aotc.runtime.server import engine_client
from aotc.runtime.server.engine_client import EngineClient, EngineGone


@pytest.mark.parametrize(
    ("options", "init", "message"),
    [
        ({"gpus": 0}, 0, "the NVIDIA driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({}, 100, "the GPU reports CUDA_ERROR_NO_DEVICE in cuInit: the NVIDIA driver finds no GPU: look at nvidia-smi and"),
        ({}, 34, "CUDA_ERROR_STUB_LIBRARY in cuInit: libcuda.so.1 is a stub of the toolkit: install a driver"),
        ({}, 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH in cuInit: .*differ: restart the machine or install them again"),
        ({"version": 12020}, 0, "is for CUDA 12.2, at least 12.3 is needed: install a newer driver"),
    ],
)
def test_what_is_missing_is_said(gpu, fake_driver, options, init, message):
    driver = fake_driver(**options)
    if init:
        driver.failing["cuInit"] = init
    with pytest.raises(DeviceError, match=message) as caught:
        aotc.runtime.devices.cuda.CudaDevice()
    assert "\n" not in str(caught.value) and driver.everything == {}


def test_another_architecture_is_refused_with_what_is_inside(cuda_artifact, gpu):
    device, driver = gpu(capability=(12, 0))
    message = r"was compiled for sm80, sm90; this GPU is sm120 \(Fake GPU\): compile the model again with --arch sm120"
    with pytest.raises(ArtifactError, match=message):
        CudaExecutor(cuda_artifact, 1, device)
    assert driver.everything == {}


@pytest.mark.parametrize(
    ("capability", "target", "said"),
    [((8, 0), "sm80", 0), ((8, 6), "sm80", 1), ((8, 9), "sm80", 1), ((9, 0), "sm90", 0)],
)
def test_code_of_a_near_architecture_runs_and_is_said_to_be_untuned(cuda_artifact, gpu, caplog, capfd, capability, target, said):
    with caplog.at_level(logging.DEBUG):
        assert CudaExecutor(cuda_artifact, 1, gpu(capability=capability)[0]).target.name == target
    assert len(caplog.records) == said
    if said:
        here = "sm{}{}".format(*capability)
        assert caplog.records[0].levelname == "WARNING"
        assert f"runs untuned on this Fake GPU ({here}) with the code of sm80: compile it with --arch {here}" in caplog.text
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def broken(cuda_artifact, gpu):
    """broken(code) -> an engine with one request, whose GPU fails in its second step; its driver."""

    def make(code):
        device, driver = gpu()
        executor = CudaExecutor(cuda_artifact, 1, device)
        executor.finish_warming()
        engine = Engine(executor, ())
        engine.submit(Request("r", (5, 6, 7), SamplingParams(temperature=0, max_tokens=9), seed=0))
        assert engine.step() == [], "its token comes while the next step is under way"
        plan = cuda_artifact.plan("plans/sm90/decode_1.json")
        kernel = plan.kernels[list(plan.calls())[2].kernel].symbol
        driver.faults[kernel] = code
        return engine, driver, kernel

    return make


@pytest.mark.parametrize(("code", "name"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (719, "CUDA_ERROR_LAUNCH_FAILED")])
def test_a_step_that_fails_gives_no_token_and_no_step_follows(broken, code, name):
    engine, driver, _ = broken(code)
    message = (
        f"step 2 failed in program decode_1: the GPU reports {name} in cuMemcpyDtoHAsync; load the model in a new "
        "process; with AOTC_SYNC=1 the kernel is named"
    )
    launched = len(driver.launched)
    for _ in range(3):
        with pytest.raises(DeviceLostError) as caught:
            engine.step()
        assert str(caught.value) == message
    assert len(driver.launched) == launched + 1
    engine._executor.close()
    assert driver.contexts == 0


def test_kernel_by_kernel_the_one_at_fault_is_named(broken, monkeypatch):
    monkeypatch.setenv("AOTC_SYNC", "1")
    engine, driver, kernel = broken(700)
    launched = len(driver.launched)
    message = f"step 2 failed in program decode_1: kernel {kernel}: the GPU reports CUDA_ERROR_ILLEGAL_ADDRESS in cuStream"
    with pytest.raises(DeviceLostError, match=message):
        engine.step()
    assert len(driver.launched) == launched + 3, "the third kernel of the program"


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync", "cuStreamSynchronize"])
def test_a_prompt_that_does_not_arrive(cuda_artifact, gpu, function):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    long = sequence(*range(executor.max_model_len - 1))
    executor.start(long)  # there is no room for another one beside it before it has arrived
    driver.failing[function] = 719
    with pytest.raises(DeviceLostError, match=f"program start: the GPU reports CUDA_ERROR_LAUNCH_FAILED in {function};"):
        executor.start(long)
    del driver.failing[function]
    with pytest.raises(DeviceLostError, match="program start"):
        executor.step([Row(sequence(5), 0, 1, True)])


def test_a_gpu_is_chosen_by_its_number(cuda_artifact, fake_driver):
    driver = fake_driver(gpus=3)
    for name, number in (("cuda", 0), ("cuda:2", 2), ("cuda:00", 0)):
        with aotc.load(cuda_artifact.path, max_num_seqs=1, device=name):
            assert driver.opened.pop() == number
    with pytest.raises(DeviceError, match="^there is no cuda:3: the GPUs here are cuda:0 to cuda:2$"):
        aotc.load(cuda_artifact.path, device="cuda:3")
    fake_driver(gpus=1)
    with pytest.raises(DeviceError, match="^there is no cuda:1: the one GPU here is cuda:0$"):
        aotc.load(cuda_artifact.path, device="cuda:1")
    for name in ("cuda:", "cuda:-1", "cuda:x", "cuda:1000", "CUDA", "gpu", ""):
        with pytest.raises(RequestError, match=f"^device must be auto, cpu, cuda or cuda:NUMBER, got '{name}'$"):
            aotc.load(cuda_artifact.path, device=name)


def test_the_code_of_another_target_runs_where_it_is_asked_for(cuda_artifact, fake_driver, monkeypatch):
    fake_driver(capability=(12, 0))
    device = CudaDevice()
    with pytest.raises(ArtifactError, match="this GPU is sm120"):
        device.target_of(cuda_artifact)
    monkeypatch.setenv("AOTC_TARGET", "sm80")
    assert device.target_of(cuda_artifact).name == "sm80"
    monkeypatch.setenv("AOTC_TARGET", "sm70")
    with pytest.raises(ArtifactError, match="AOTC_TARGET is 'sm70', and .* was compiled for sm80, sm90$"):
        device.target_of(cuda_artifact)


def test_where_two_steps_are_under_way_either_may_be_at_fault(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 1, device)
    one = sequence(5, 6, 7)
    first = executor.launch([Row(one, 0, 1, False)])
    executor.launch([Row(one, 1, 1, False)])
    driver.failing["cuEventSynchronize"] = 700
    with pytest.raises(DeviceLostError, match="^step 1 or 2 failed in program decode_1: the GPU reports CUDA_ERROR_ILL"):
        executor.wait(first)


def test_run_ends_with_a_code_of_its_own(cuda_artifact, fake_driver, capfd):
    driver = fake_driver()
    command = ["run", str(cuda_artifact.path), "--prompt", "abc", "--raw", "--max-tokens", "4", "--device", "cuda"]
    assert main(command) == 0
    assert capfd.readouterr().err == ""
    driver.faults[driver.functions[-1]] = 700
    assert main(command) == 70
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("aotc: error: step 1 failed in program extend_128: the GPU reports CUDA_ERROR_ILL")
    assert err.count("\n") == 1


def ask(artifact):
    """The client of an engine process on a GPU, and the tokens of one request or the error that it got."""

    async def ask_one():
        client = EngineClient(str(artifact.path), 1, device="cuda")
        running = asyncio.create_task(client.run())
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        try:
            return client, [t.token_id async for t in client.generate([5, 6, 7], params, seed=0)]
        except EngineGone as error:
            return client, str(error)
        finally:
            running.cancel()

    return asyncio.run(asyncio.wait_for(ask_one(), 60))


def test_a_server_starts_another_engine_process(cuda_artifact, install_driver, monkeypatch, caplog, capfd, tmp_path):
    """The process ends with its documented code; a request that had no token yet is answered by the next one."""
    install_driver(f"broken_cuda.BrokenDriver({str(tmp_path / 'flag')!r})")
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    with caplog.at_level(logging.ERROR, "aotc.server"):
        assert ask(cuda_artifact)[1] == [0, 0, 0]
    assert "starting another in 0.0 s (exit code 70: the device failed in a step)" in caplog.text
    assert "aotc: error: step 1 failed in program paged_extend_128: the GPU reports CUDA_ERROR_ILLEGAL" in capfd.readouterr().err


def test_a_server_says_how_much_memory_is_missing(cuda_artifact, install_driver):
    install_driver("fake_cuda.FakeDriver(free=1000)")
    client, error = ask(cuda_artifact)
    assert re.match("the engine cannot start: .* needs 0.000 GB on the GPU and 0.000 GB are free: serve fewer", error)
    assert client.failed in error
