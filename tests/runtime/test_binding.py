"""Bound arrays: read and written where they lie, checked once, kept alive; on the CPU, and on a GPU that an interpreter
plays."""

import ctypes
import gc
import itertools
import multiprocessing
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from device_arrays import DeviceArray
from interpreted_cuda import InterpretedDriver
from onnx import TensorProto, helper
from tensor_models import compiled, info, mixed, two_dims

import aotc
from aotc.artifact.reader import open_artifact
from aotc.errors import DeviceLostError, RequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_dims(tmp_path_factory.mktemp("two"), "cpu,sm90")


@pytest.fixture
def model(folder):
    with aotc.load(folder, device="cpu") as loaded:
        yield loaded


def arrays(batch=2, time=3, seed=0):
    rng = np.random.default_rng(seed)
    x, scale = rng.standard_normal((batch, time, 4)).astype(np.float32), rng.random(batch).astype(np.float32)
    return {"x": x, "scale": scale, "y": np.full((batch, 4), np.nan, np.float32)}


def expected(x, scale, **_):
    return np.maximum(x, 0).sum(1) * scale[:, None]


def test_a_run_reads_and_writes_the_callers_arrays(model):
    a = arrays()
    run = model.bind(**a)
    assert np.isnan(a["y"]).all(), "nothing runs before the call"
    for seed in range(3):
        a["x"][:] = arrays(seed=seed)["x"]
        assert run() is None
        np.testing.assert_allclose(a["y"], expected(**a), rtol=1e-5, atol=1e-6)


def test_torch_tensors_are_bound_in_place(model):
    a = {name: torch.from_numpy(array.copy()) for name, array in arrays().items()}
    run = model.bind(**a)
    a["x"].mul_(-2)
    run()
    np.testing.assert_allclose(a["y"].numpy(), expected(a["x"].numpy(), a["scale"].numpy()), rtol=1e-5, atol=1e-6)


def test_a_run_takes_no_memory(model):
    a = arrays(8, 16)
    x, run = a["x"], model.bind(**a)
    run()
    gc.collect()
    tracemalloc.start()
    try:
        run()
        turns = itertools.repeat(None, 1000)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in turns:
            run()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now - before < 200, "numbers of this test, and not one object a run"
    assert peak - before < 1500 < x.nbytes, "the arguments of the C call alone"


def test_bindings_of_other_shapes_and_calls_do_not_disturb_each_other(model):
    small, large = arrays(1, 2), arrays(8, 16, 1)
    runs = [model.bind(**small), model.bind(**large)]
    for _ in range(3):
        for run, a in zip(runs, (small, large), strict=True):
            run()
            model(**{k: v for k, v in arrays(3, 5).items() if k != "y"})
            np.testing.assert_allclose(a["y"], expected(**a), rtol=1e-5, atol=1e-6)


def test_the_arrays_live_as_long_as_the_binding(model):
    a = {name: torch.from_numpy(array.copy()) for name, array in arrays().items()}
    storages = [weakref.ref(t.untyped_storage()) for t in a.values()]
    kept = np.zeros(12, np.float32).reshape(1, 3, 4)
    before = sys.getrefcount(kept)
    run = model.bind(x=kept, scale=np.ones(1, np.float32), y=np.zeros((1, 4), np.float32))
    assert sys.getrefcount(kept) > before
    run.close()
    assert sys.getrefcount(kept) == before
    run = model.bind(**a)
    a.clear()
    gc.collect()
    run()
    run.close()
    run.close()
    gc.collect()
    assert all(s() is None for s in storages)
    with pytest.raises(RequestError, match="^the binding was closed: bind the arrays again$"):
        run()


def test_after_close_a_binding_raises(folder):
    model = aotc.load(folder, device="cpu")
    run = model.bind(**arrays())
    run()
    model.close()
    for _ in range(2):
        with pytest.raises(RequestError, match="^the model was closed: load it again$"):
            run()
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        model.bind(**arrays())
    run.close()


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def unaligned(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    raw[:] = a
    return raw


REFUSED = [
    ({"x": None}, "input x is a NoneType: bind a numpy array or one that has __dlpack__"),
    ({"x": np.zeros((2, 3, 4))}, "input x is f64, not f32: convert it before the call"),
    ({"x": np.zeros((2, 3, 4), ">f4")}, "input x is >f4, not f32: convert it before the call"),
    ({"x": np.zeros((2, 12), np.float32)}, "input x has 2 axes, not 3"),
    ({"x": np.zeros((2, 3, 5), np.float32)}, "input x has shape (2, 3, 5), not (2, 3, 4)"),
    ({"x": np.zeros((3, 3, 4), np.float32)}, "input scale has batch = 2, another input has 3"),
    ({"x": np.zeros((2, 17, 4), np.float32)}, "dim time is 17: the model was compiled for 1 to 16"),
    ({"x": np.zeros((2, 6, 4), np.float32)[:, ::2]}, "input x is not contiguous: bind np.ascontiguousarray(...) of it"),
    ({"x": torch.zeros(2, 4, 3).transpose(1, 2)}, "input x is not contiguous: bind a contiguous copy"),
    ({"x": unaligned(np.zeros((2, 3, 4), np.float32))}, "input x does not begin at a multiple of 4 bytes: bind a copy"),
    ({"y": np.zeros((2, 4))}, "output y is f64, not f32: bind an array of that type"),
    ({"y": np.zeros((3, 4), np.float32)}, "output y has shape (3, 4), not (2, 4)"),
    ({"y": read_only(np.zeros((2, 4), np.float32))}, "output y is read-only: bind an array that can be written"),
    ({"y": ...}, "bind takes all inputs (x, scale) and outputs (y): y is missing"),
    ({"z": 1}, "bind takes all inputs (x, scale) and outputs (y): z is unknown"),
    ({"stream": 0}, "stream is for models on a GPU: leave it out"),
    ({"x": DeviceArray(4096, (2, 3, 4))},
     "input x is in memory of a CUDA device, the model runs on the CPU: bind an array there"),
    ({"x": DeviceArray(0, (2, 3, 4), device=(10, 0))}, "input x is in memory of a device of kind 10, the model runs on the CPU: "
     "bind an array there"),
    ({"x": DeviceArray(0, (2, 3, 4), device=(1, 0), lanes=4)}, "input x is f32x4, not f32: convert it before the call"),
    ({"x": DeviceArray(0, (2, 3, 4), device=(1, 0), code=5, bits=64)},
     "input x is code5_64, not f32: convert it before the call"),
    ({"x": DeviceArray(0, (2, 3, 4), device=(1, 0), version=(2, 0))}, "input x speaks DLPack 2.0, this aotc 1: "
     "bind another kind of array"),
    ({"y": DeviceArray(4096, (2, 4), device=(1, 0), flags=1)}, "output y is read-only: bind an array that can be written"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_does_not_fit_is_refused_in_one_line(model, change, message):
    with pytest.raises(RequestError) as caught:
        model.bind(**{k: v for k, v in {**arrays(), **change}.items() if v is not ...})
    assert str(caught.value) == message


def test_a_tensor_that_gives_no_memory(model):
    with pytest.raises(RequestError, match="^input x does not give its memory through DLPack: .*grad") as caught:
        model.bind(**{**arrays(), "x": torch.zeros(2, 3, 4, requires_grad=True)})
    assert "\n" not in str(caught.value)


def test_an_output_needs_memory_of_its_own(model):
    block = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(RequestError, match="^input x and output y share memory: an output needs memory of its own$"):
        model.bind(x=block, scale=np.ones(2, np.float32), y=block.reshape(-1)[:8].reshape(2, 4))
    both = np.ones(24, np.float32)
    model.bind(x=both.reshape(2, 3, 4), scale=both[:2], y=np.zeros((2, 4), np.float32))()  # inputs may share


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsules_of_either_version_with_an_offset(model, version):
    a = arrays()
    raw = np.concatenate([np.zeros(8, np.float32), a["x"].reshape(-1)])
    x = DeviceArray(raw.ctypes.data, (2, 3, 4), device=(1, 0), offset=32, version=version, strides=(12, 4, 1))
    model.bind(**{**a, "x": x})()
    np.testing.assert_allclose(a["y"], expected(**a), rtol=1e-5, atol=1e-6)
    assert x.streams == [None]


def test_scalars_small_types_and_outputs_of_one_value(tmp_path):
    nodes = [
        helper.make_node("Not", ["m"], ["not"]), helper.make_node("Cast", ["s"], ["i"], to=TensorProto.INT8),
        helper.make_node("Cast", ["s"], ["h"], to=TensorProto.FLOAT16),
    ]  # fmt: skip
    ins = [info("s", []), info("m", [3], TensorProto.BOOL)]
    outs = [info("not", [3], TensorProto.BOOL), info("i", [], TensorProto.INT8), info("h", [], TensorProto.FLOAT16)]
    a = {
        "s": torch.tensor(3.5), "m": torch.tensor([True, False, True]), "not": torch.zeros(3, dtype=torch.bool),
        "i": torch.zeros((), dtype=torch.int8), "h": torch.zeros((), dtype=torch.float16),
    }  # fmt: skip
    with aotc.load(compiled(tmp_path, nodes, ins, outs), device="cpu") as model:
        model.bind(**a)()
    assert (a["not"].tolist(), a["i"].item(), a["h"].item()) == ([False, True, False], 3, 3.5)
    (tmp_path / "more").mkdir()
    with aotc.load(mixed(tmp_path / "more"), device="cpu") as model:
        a = {name: np.zeros((2, 3), np.float32) for name in ("x", "same", "y", "again")}
        run = model.bind(**a)
        a["x"][:] = 4
        run()
    assert [a[n].tolist() for n in ("same", "y", "again")] == [[[v] * 3] * 2 for v in (4, 5, 5)]


def test_threads_run_one_binding(model):
    a = arrays()
    run = model.bind(**a)
    threads = [threading.Thread(target=lambda: [run() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(a["y"], expected(**a), rtol=1e-5, atol=1e-6)


def _say(run, queue):
    try:
        run()
    except RequestError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_process_a_binding_raises(model):
    run, context = model.bind(**arrays()), multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_say, args=(run, queue))
    child.start()
    assert queue.get() == "the model was loaded before this process was forked off: load it again here, after the fork"
    child.join()
    run()


class Gpu:
    """The model on an interpreted GPU, and arrays in its memory."""

    def __init__(self, folder, use_driver):
        self.driver = use_driver(InterpretedDriver(open_artifact(folder)))
        self.model = aotc.load(folder, device="cuda")

    def put(self, array, **options):
        address = self.driver.do_cuMemAlloc(array.nbytes)
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        placed = DeviceArray(address, array.shape, **options)
        placed.address = address
        return placed

    def get(self, placed, like):
        out = np.empty_like(like)
        ctypes.memmove(out.ctypes.data, placed.address, out.nbytes)
        return out


@pytest.fixture
def gpu(folder, use_driver):
    return Gpu(folder, use_driver)


def test_device_arrays_are_bound_without_a_copy(gpu):
    a = arrays()
    placed = {name: gpu.put(array) for name, array in a.items()}
    run = gpu.model.bind(**placed)
    (own,) = {p.streams[0] for p in placed.values()}
    assert own == int(gpu.model._program.device.stream), "libraries wait for the stream that will read"
    loaded, taken = len(gpu.driver.trace), gpu.driver.allocations
    run()
    assert [step[0] for step in gpu.driver.trace[loaded:]] == ["launch"]
    np.testing.assert_allclose(gpu.get(placed["y"], a["y"]), expected(**a), rtol=1e-4, atol=1e-6)
    a["x"][:] = arrays(seed=5)["x"]
    ctypes.memmove(placed["x"].address, a["x"].ctypes.data, a["x"].nbytes)
    run()
    np.testing.assert_allclose(gpu.get(placed["y"], a["y"]), expected(**a), rtol=1e-4, atol=1e-6)
    assert gpu.driver.allocations == taken
    other = arrays(3, 5)
    got = gpu.model(x=other["x"], scale=other["scale"])["y"]  # at dims of its own
    np.testing.assert_allclose(got, expected(**other), rtol=1e-4, atol=1e-6)
    run()
    np.testing.assert_allclose(gpu.get(placed["y"], a["y"]), expected(**a), rtol=1e-4, atol=1e-6)


def test_a_run_in_the_callers_stream_is_not_waited_for_but_ordered(gpu):
    a = arrays()
    placed = {name: gpu.put(array) for name, array in a.items()}
    stream = gpu.driver.do_cuStreamCreate(0)
    run = gpu.model.bind(**placed, stream=stream)
    assert {p.streams[0] for p in placed.values()} == {stream}
    waits = gpu.driver.calls["cuStreamSynchronize"]
    run()
    run()
    assert gpu.driver.calls["cuStreamSynchronize"] == waits and gpu.driver.calls["cuStreamWaitEvent"] == 0
    assert gpu.driver.calls["cuEventRecord"] == 2
    gpu.model(x=a["x"], scale=a["scale"])
    assert gpu.driver.calls["cuStreamWaitEvent"] == 1, "the arena is still in use by the caller's stream"
    gpu.model(x=a["x"], scale=a["scale"])
    assert gpu.driver.calls["cuStreamWaitEvent"] == 1
    run()
    gpu.model.close()
    assert gpu.driver.calls["cuEventSynchronize"] == 1
    gpu.driver.do_cuStreamDestroy(stream)
    for p in placed.values():
        gpu.driver.do_cuMemFree(p.address)
    assert gpu.driver.everything == {}


def test_a_binding_that_still_runs_is_waited_for_before_its_graphs_go(gpu):
    placed = {name: gpu.put(array) for name, array in arrays().items()}
    run = gpu.model.bind(**placed, stream=gpu.driver.do_cuStreamCreate(0))
    run()
    run.close()
    assert gpu.driver.calls["cuEventSynchronize"] == 1
    gpu.model(x=arrays()["x"], scale=arrays()["scale"])
    gpu.model.close()
    assert (gpu.driver.calls["cuEventSynchronize"], gpu.driver.calls["cuStreamWaitEvent"]) == (1, 0), "its event is gone"


def test_what_a_binding_takes_is_given_back(gpu):
    placed = {name: gpu.put(array) for name, array in arrays().items()}
    stream = gpu.driver.do_cuStreamCreate(0)
    before = gpu.driver.everything
    for n in range(4):
        run = gpu.model.bind(**placed, stream=None if n % 2 else stream)
        assert gpu.driver.everything != before
        run()
        if n < 2:
            run.close()
            assert gpu.driver.everything == before
        else:
            del run  # given back by the next binding
    gpu.model.bind(**placed).close()
    assert gpu.driver.everything == before
    run = gpu.model.bind(**placed)
    gpu.model.close()
    run.close()
    with pytest.raises(RequestError, match="the binding was closed|the model was closed"):
        run()


@pytest.mark.parametrize(
    ("options", "stream", "message"),
    [
        ({"device": (1, 0)}, None, "input x is in memory of the CPU, the model runs on a CUDA device: bind an array there"),
        ({"device": (2, 1)}, None,
         "input x is in memory of a CUDA device 1, the model runs on a CUDA device: bind an array there"),
        ({"offset": 4}, None, "input x does not begin at a multiple of 16 bytes: bind a copy"),
        ({}, -1, "stream is the address of a CUDA stream as an integer, not -1"),
        ({}, "0", "stream is the address of a CUDA stream as an integer, not '0'"),
    ],
)  # fmt: skip
def test_a_gpu_refuses(gpu, options, stream, message):
    placed = {name: gpu.put(array) for name, array in arrays().items()}
    placed["x"] = gpu.put(arrays()["x"], **options)
    before = gpu.driver.everything
    with pytest.raises(RequestError) as caught:
        gpu.model.bind(**placed, stream=stream)
    assert str(caught.value) == message
    assert gpu.driver.everything == before


def test_a_failure_of_the_gpu_ends_the_model(gpu):
    placed = {name: gpu.put(array) for name, array in arrays().items()}
    run = gpu.model.bind(**placed)
    gpu.driver.faults[gpu.driver.functions[0]] = 719
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="step 1 failed in program main"):
            run()
