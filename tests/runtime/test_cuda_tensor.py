"""Tensor models on a GPU whose kernels an interpreter runs: they say what the CPU says; copies, memory and errors."""

import gc
import threading

import numpy as np
import onnx
import pytest
from interpreted_cuda import InterpretedDriver
from onnx import TensorProto, helper

import aotc
from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.cli.inspect_command import describe
from aotc.errors import ArtifactError, DeviceError, DeviceLostError, RequestError


def branching(path):
    """out = sum(x) > 0 ? x @ w : -(x @ w), and the largest of each row; x [batch, 6] f32, mask [batch] bool."""
    w = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    then = helper.make_graph([helper.make_node("Relu", ["p"], ["t"])], "then", [], [info("t", None)])
    orelse = helper.make_graph([helper.make_node("Neg", ["p"], ["e"])], "else", [], [info("e", None)])
    nodes = [
        helper.make_node("Where", ["mask", "x", "zero"], ["kept"]),
        helper.make_node("MatMul", ["kept", "w"], ["p"]),
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["out"], then_branch=then, else_branch=orelse),
        helper.make_node("ArgMax", ["out"], ["best"], axis=1, keepdims=0),
    ]
    inputs = [info("x", ["batch", 6]), info("mask", ["batch", 1], TensorProto.BOOL)]
    outputs = [info("out", ["batch", 5]), info("best", ["batch"], TensorProto.INT64)]
    initial = [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(np.float32(0).reshape(()), "zero")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initial)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def info(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor")
    branching(folder / "m.onnx")
    arguments = ["compile", str(folder / "m.onnx"), "--arch", "cpu,sm90", "--dim", "batch=1..8", "--quiet"]
    assert main([*arguments, "-o", str(folder / "artifact")]) == 0
    return open_artifact(folder / "artifact")


@pytest.fixture
def driver(artifact, use_driver):
    return use_driver(InterpretedDriver(artifact))


def inputs(batch, sign=1, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": np.abs(rng.standard_normal((batch, 6))).astype(np.float32) * sign, "mask": rng.random((batch, 1)) < 0.7}


def test_answers_are_those_of_the_cpu(artifact, driver):
    reference = aotc.load(artifact.path, device="cpu")
    with aotc.load(artifact.path, device="cuda") as model:
        for batch in (1, 8, 3):
            for sign in (1, -1):
                given = inputs(batch, np.float32(sign), batch)
                expected, got = reference(**given), model(**given)
                np.testing.assert_allclose(got["out"], expected["out"], rtol=1e-4, atol=1e-6)
                np.testing.assert_array_equal(got["best"], expected["best"])
                assert {k: v.dtype for k, v in got.items()} == {"out": np.float32, "best": np.int64}
    assert driver.everything == {}


def test_a_call_copies_launches_and_copies_in_order(artifact, driver):
    model = aotc.load(artifact.path, device="cuda")
    loaded = len(driver.trace)
    model(**inputs(3))
    kinds = [step[0] for step in driver.trace[loaded:]]
    assert kinds == ["up", "launch", "down", "launch", "launch", "down", "down"], "the first copy down is a condition"
    sizes = [step[2] for step in driver.trace[loaded:] if step[0] == "down"]
    assert sizes == [1, 3 * 5 * 4, 3 * 8]


def test_large_inputs_go_up_one_by_one_and_as_far_as_they_are_used(artifact, driver, monkeypatch):
    monkeypatch.setattr("aotc.runtime.cuda_tensor._SMALL", 0)
    model = aotc.load(artifact.path, device="cuda")
    loaded = len(driver.trace)
    given = inputs(3)
    out = model(**given)["out"]
    assert [step[2] for step in driver.trace[loaded:] if step[0] == "up"] == [4, 3 * 6 * 4, 3]
    np.testing.assert_allclose(out, aotc.load(artifact.path, device="cpu")(**given)["out"], rtol=1e-4, atol=1e-6)


def test_memory_is_exact_and_calls_take_none(artifact, driver):
    model = aotc.load(artifact.path, device="cuda")
    assert model.memory.total == sum(map(len, driver.blocks.values()))
    (said,) = (t["memory"] for t in describe(artifact)["targets"] if t["name"] == "sm90")
    assert said["total"] == model.memory.total
    assert model.memory.pinned == sum(map(len, driver.host.values()))
    before, things = driver.allocations, driver.everything
    for batch in (1, 2, 8):
        model(**inputs(batch))
    assert (driver.allocations, driver.everything) == (before, things)
    needed = model.memory.total
    model.close()
    driver.free = needed - 1
    with pytest.raises(DeviceError, match="are free: give dims a smaller upper bound with --dim"):
        aotc.load(artifact.path, device="cuda")
    assert driver.everything == {}


def test_results_are_the_callers_own(artifact, driver):
    model = aotc.load(artifact.path, device="cuda")
    first = model(**inputs(2))["out"]
    kept = first.copy()
    model(**inputs(2, seed=1))
    np.testing.assert_array_equal(first, kept)
    model.close()
    np.testing.assert_array_equal(first, kept)
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        model(**inputs(2))


def test_threads_may_call_it(artifact, driver):
    model, found = aotc.load(artifact.path, device="cuda"), {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: model(**inputs(n))["out"]})) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, out in found.items():
        np.testing.assert_array_equal(out, model(**inputs(n))["out"])


def test_a_failing_call_is_an_error_and_so_are_all_after_it(artifact, driver):
    model = aotc.load(artifact.path, device="cuda")
    model(**inputs(1))
    driver.faults[driver.functions[0]] = 719
    message = "step 2 failed in program main_1: the GPU reports CUDA_ERROR_LAUNCH_FAILED in cu"
    for _ in range(2):
        with pytest.raises(DeviceLostError, match=message):
            model(**inputs(1))
    assert driver.everything["device"] > 0
    del model
    gc.collect()
    assert driver.contexts == 0


def test_without_a_gpu_auto_is_the_cpu(artifact, fake_driver):
    driver = fake_driver(gpus=0)
    model = aotc.load(artifact.path)
    assert type(model._program).__name__ == "CpuTensorProgram" and driver.calls["cuDeviceGetCount"] == 1
    with pytest.raises(DeviceError, match="finds no GPU"):
        aotc.load(artifact.path, device="cuda")
    with pytest.raises(RequestError, match="device must be auto, cpu, cuda or cuda:NUMBER, got 'tpu'"):
        aotc.load(artifact.path, device="tpu")


def test_a_refused_artifact_leaves_no_gpu_open(fake_driver, tmp_path):
    driver = fake_driver()
    with pytest.raises(ArtifactError, match="is no folder"):
        aotc.load(tmp_path / "none", device="cuda")
    for thread in threading.enumerate():
        if thread.name == "aotc-opening":
            thread.join()
    del thread
    gc.collect()
    assert driver.calls["cuDevicePrimaryCtxRetain"] == 1 and driver.everything == {}


def test_scalars_strided_inputs_outputs_that_are_inputs_and_small_types(tmp_path, use_driver):
    """y = x + s, its sum, x itself, x as i8 and f16, m & m."""
    nodes = [
        helper.make_node("Add", ["x", "s"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Cast", ["x"], ["i8"], to=TensorProto.INT8),
        helper.make_node("Cast", ["x"], ["f16"], to=TensorProto.FLOAT16),
        helper.make_node("Not", ["m"], ["not"]),
    ]
    inputs = [info("x", [3, 2]), info("s", []), info("m", [3], TensorProto.BOOL)]
    outputs = [
        info("y", [3, 2]), info("total", []), info("same", [3, 2]), info("i8", [3, 2], TensorProto.INT8),
        info("f16", [3, 2], TensorProto.FLOAT16), info("not", [3], TensorProto.BOOL),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "--arch", "cpu,sm90", "-o", str(tmp_path / "a"), "--quiet"]) == 0
    x = np.arange(6, dtype=np.float32).reshape(2, 3).T
    given = {"x": x, "s": np.float32(2), "m": np.array([True, False, True])}
    expected = {
        "y": x + 2, "total": np.float32(27), "same": x, "i8": x.astype(np.int8), "f16": x.astype(np.float16),
        "not": ~given["m"],
    }  # fmt: skip
    use_driver(InterpretedDriver(open_artifact(tmp_path / "a")))
    for device in ("cpu", "cuda"):
        with aotc.load(tmp_path / "a", device=device) as model:
            got = model(**given)
        for name, array in expected.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), (device, name)
            np.testing.assert_array_equal(got[name], array, err_msg=f"{device} {name}")
