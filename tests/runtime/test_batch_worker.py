"""Requests that are submitted: answers, neighbours, deadlines, cancelling, closing. The device is a model that waits for
the test, but for the last tests, which run a real one."""

import asyncio
import gc
import multiprocessing
import threading
import weakref
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import helper
from tensor_models import compiled, info, two_dims

import aotc
from aotc.artifact.plan import Dim, Tensor
from aotc.errors import DeadlineExceeded, DeviceLostError, RequestError
from aotc.runtime import batch_worker
from aotc.runtime.batch_worker import Batcher, batch_bounds
from aotc.runtime.row_probe import DEPENDENT, require_independent_rows
from aotc.runtime.signature import DTYPES

WAIT = 60  # seconds until a test gives up


def batch(*more):
    return (((1, ("batch",)),), *more)


def plan(inputs=None, outputs=None):
    inputs = inputs or (Tensor("x", "f32", batch(3), 0),)
    outputs = outputs or (Tensor("y", "f32", batch(3), 0),)
    return SimpleNamespace(inputs=inputs, outputs=outputs, dims=(Dim("batch", 1, 8), Dim("n", 1, 8)))


class Device:
    """Doubles; notes the sizes of batches. While `stopped`, a run waits for `go`."""

    def __init__(self):
        self.sizes, self.started, self.go, self.error = [], threading.Semaphore(0), threading.Semaphore(0), None
        self.stopped = False

    def run(self, given):
        self.sizes.append(len(given[0]))
        if self.stopped:
            self.started.release()
            assert self.go.acquire(timeout=WAIT)
        if self.error is not None:
            raise self.error
        return [given[0] * 2]


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def make(device):
    made = []

    def make(**options):
        made.append(Batcher(plan(), device.run, **{"max_batch_size": None, "max_wait_ms": 0, "min_batch_size": 1, **options}))
        made[-1]._proven = True
        return made[-1]

    yield make
    device.go.release(100)
    for batcher in made:
        batcher.close()


def rows(*values):
    return [np.repeat(np.array(values, np.float32)[:, None], 3, 1)]


def hold(batcher, device):
    """A request that runs until `device.go`: what comes now waits behind it."""
    device.stopped = True
    first = batcher.submit(rows(0), None)
    assert device.started.acquire(timeout=WAIT)
    device.stopped = False
    return first


def test_what_waits_runs_together_and_answers_are_apart(make, device):
    batcher = make()
    first = hold(batcher, device)
    futures = [batcher.submit(rows(*range(n, n + size)), None) for n, size in ((1, 1), (2, 3), (5, 2))]
    device.go.release()
    answers = [f.result(WAIT)["y"] for f in (first, *futures)]
    assert [a[:, 0].tolist() for a in answers] == [[0], [2], [4, 6, 8], [10, 12]]
    assert device.sizes == [1, 6]
    assert all(a.flags.owndata for a in answers)
    answers[1][:] = -1
    assert answers[2][0, 0] == 4


def test_batches_are_no_larger_than_they_may_be(make, device):
    batcher = make(max_batch_size=3)
    first = hold(batcher, device)
    futures = [batcher.submit(rows(n), None) for n in range(1, 8)]
    device.go.release()
    assert [f.result(WAIT)["y"][0, 0] for f in (first, *futures)] == [2 * n for n in range(8)]
    assert device.sizes == [1, 3, 3, 1]
    with pytest.raises(RequestError, match="^a request of 4 rows is more than a batch of 3: split it$"):
        batcher.submit(rows(1, 2, 3, 4), None)


def test_a_request_past_its_deadline_is_not_computed(make, device, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(batch_worker, "_clock", lambda: now[0])
    batcher = make()
    first = hold(batcher, device)
    late, patient = batcher.submit(rows(1), 5), batcher.submit(rows(2), None)
    now[0] = 0.005
    device.go.release()
    assert patient.result(WAIT)["y"][0, 0] == 4 and first.result(WAIT)
    with pytest.raises(DeadlineExceeded, match="^the deadline passed before the model could run: allow more milliseconds$"):
        late.result(WAIT)
    assert device.sizes == [1, 1]
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="deadline_ms is .*: give milliseconds from now, above 0"):
            batcher.submit(rows(1), wrong)


def test_it_leaves_when_nothing_new_arrives(make, device):
    assert make(max_wait_ms=1, min_batch_size=4).submit(rows(7), None).result(WAIT)["y"][0, 0] == 14


def test_cancelled_requests_are_dropped(make, device):
    batcher = make()
    hold(batcher, device)
    one, two, three = (batcher.submit(rows(n), None) for n in range(3))
    assert one.cancel() and three.cancel()
    device.go.release()
    assert two.result(WAIT)["y"][0, 0] == 2
    assert device.sizes == [1, 1]
    with pytest.raises(CancelledError):
        one.result(WAIT)
    hold(batcher, device)
    only = batcher.submit(rows(1), None)
    only.cancel()
    device.go.release()
    assert batcher.submit(rows(5), None).result(WAIT)["y"][0, 0] == 10


def test_a_failing_run_fails_its_batch_and_no_other(make, device):
    batcher = make()
    first = hold(batcher, device)
    both = [batcher.submit(rows(n), None) for n in range(2)]
    device.go.release()
    first.result(WAIT)
    for future in both:
        future.result(WAIT)
    device.error = DeviceLostError("step 3 failed")
    hold(batcher, device)
    both = [batcher.submit(rows(n), None) for n in range(2)]
    device.go.release()
    errors = [f.exception(WAIT) for f in both]
    assert [(type(e), str(e)) for e in errors] == [(DeviceLostError, "step 3 failed")] * 2 and errors[0] is not errors[1]
    device.error = None
    assert batcher.submit(rows(4), None).result(WAIT)["y"][0, 0] == 8


def test_closing_ends_the_thread_and_fails_what_waits(make, device):
    batcher = make()
    assert batcher._thread is None, "no thread before the first request"
    first = hold(batcher, device)
    waiting, thread = batcher.submit(rows(1), None), batcher._thread
    assert thread.daemon and thread.name == "aotc-batcher"
    closer = threading.Thread(target=batcher.close)
    closer.start()
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        waiting.result(WAIT)
    device.go.release()
    assert first.result(WAIT)["y"][0, 0] == 0, "what runs is finished"
    closer.join(WAIT)
    thread.join(WAIT)
    assert not thread.is_alive()
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        batcher.submit(rows(1), None)
    batcher.close()


def test_a_thread_without_requests_ends_and_another_follows(make, device, monkeypatch):
    monkeypatch.setattr(batch_worker, "_LINGER", 0.01)
    batcher = make()
    for n in range(3):
        assert batcher.submit(rows(n), None).result(WAIT)["y"][0, 0] == 2 * n
        thread = batcher._thread
        if thread is not None:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert batcher._thread is None


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ((Tensor("x", "f32", (4, 3), 0),), None, "x does not begin with the batch; submit needs one dynamic dim that leads"),
        ((Tensor("x", "f32", (), 0),), None, "x does not begin with the batch"),
        (None, (Tensor("y", "f32", (3,), 0),), "y does not begin with the batch"),
        (None, (Tensor("y", "f32", (((2, ("batch",)),),), 0),), "y does not begin with the batch"),
        ((Tensor("x", "f32", batch(), 0), Tensor("z", "f32", (((1, ("n",)),),), 0)), None, "z does not begin with the batch"),
        (None, (Tensor("y", "f32", batch(((1, ("batch", "n")),)), 0),), "y has dim batch twice"),
    ],
)
def test_models_without_a_batch(inputs, outputs, message):
    with pytest.raises(RequestError, match=f"^{message}") as caught:
        batch_bounds(plan(inputs, outputs))
    assert str(caught.value).endswith("compile with a dynamic batch (--dim batch=1..8)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_dims(tmp_path_factory.mktemp("two"))


def arrays(count, time, seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, time, 4)).astype(np.float32), "scale": rng.random(count).astype(np.float32)}


def expected(x, scale):
    return np.maximum(x, 0).sum(1) * scale[:, None]


def test_an_event_loop_awaits_answers_of_many_shapes(folder):
    async def ask(model):
        given = [arrays(1 + n % 3, 1 + n % 4, n) for n in range(60)]
        answers = await asyncio.gather(*(model.submit(**g, deadline_ms=WAIT * 1000) for g in given))
        for g, answer in zip(given, answers, strict=True):
            np.testing.assert_allclose(answer["y"], expected(**g), rtol=1e-5, atol=1e-6)

    with aotc.load(folder, device="cpu") as model:
        asyncio.run(ask(model))
        model(**arrays(1, 1, 0))


def test_a_bad_request_fails_alone(folder):
    async def ask(model):
        good = [model.submit(**arrays(1, 3, n)) for n in range(3)]
        with pytest.raises(RequestError, match="^input x is float64, not f32"):
            await model.submit(x=np.zeros((1, 3, 4)), scale=np.ones(1, np.float32))
        with pytest.raises(RequestError, match="^input scale has batch = 2, another input has 1|another input has"):
            await model.submit(x=np.zeros((1, 3, 4), np.float32), scale=np.ones(2, np.float32))
        for n, answer in enumerate(await asyncio.gather(*good)):
            np.testing.assert_allclose(answer["y"], expected(**arrays(1, 3, n)), rtol=1e-5, atol=1e-6)

    with aotc.load(folder, device="cpu") as model:
        asyncio.run(ask(model))


def test_the_event_loop_is_free_while_the_model_runs(folder):
    async def ask(model):
        with model._gate.lock:  # as while another call runs
            future = model.submit(**arrays(1, 2, 0))
            other = model.submit(**arrays(2, 2, 1))
            await asyncio.sleep(0)
            other.cancel()
            await asyncio.sleep(0)
        np.testing.assert_allclose((await future)["y"], expected(**arrays(1, 2, 0)), rtol=1e-5, atol=1e-6)
        assert other.cancelled()

    with aotc.load(folder, device="cpu") as model:
        asyncio.run(ask(model))


def test_threads_submit(folder):
    wrong = []

    def ask(model, n):
        for seed in range(20):
            given = arrays(1 + n % 2, 3, seed)
            if not np.allclose(model.submit_sync(**given)["y"], expected(**given), rtol=1e-5, atol=1e-6):
                wrong.append(n)

    with aotc.load(folder, device="cpu", max_batch_size=4, max_wait_ms=1, min_batch_size=2) as model:
        threads = [threading.Thread(target=ask, args=(model, n)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    with pytest.raises(RequestError, match="^the model was closed: load it again$"):
        model.submit_sync(**arrays(1, 1, 0))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0: give 1 or more"),
        ({"min_batch_size": 0}, "min_batch_size is 0: give 1 or more"),
        ({"max_wait_ms": 6}, "max_wait_ms is 6: give 0 to 5"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms is nan: give 0 to 5"),
    ],
)
def test_options_are_checked(folder, option, message):
    with pytest.raises(RequestError, match=f"^{message}$"):
        aotc.load(folder, device="cpu", **option)


MIXING = {
    "mean": [("ReduceMean", ["x", "first"], ["m"], {"keepdims": 1}), ("Sub", ["x", "m"], ["y"], {})],
    "sum of all": [("ReduceSum", ["x"], ["m"], {"keepdims": 0}), ("Add", ["x", "m"], ["y"], {})],
    "the largest of all": [("ReduceMax", ["x"], ["m"], {"keepdims": 0}), ("Div", ["x", "m"], ["y"], {})],
    "the number of rows": [
        ("Shape", ["x"], ["s"], {}), ("Cast", ["s"], ["f"], {"to": 1}), ("Gather", ["f", "axis"], ["n"], {}),
        ("Div", ["x", "n"], ["y"], {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_rows_is_refused(tmp_path, kind):
    nodes = [helper.make_node(op, ins, outs, **more) for op, ins, outs, more in MIXING[kind]]
    used = {name for _, ins, _, _ in MIXING[kind] for name in ins}
    weights = {"first": np.array([0], np.int64), "axis": np.array(0, np.int64)}
    weights = {n: w for n, w in weights.items() if n in used}
    artifact = compiled(tmp_path, nodes, [info("x", ["batch", 3])], [info("y", ["batch", 3])], weights, ("batch=1..8",))
    with aotc.load(artifact, device="cpu") as model:
        for ask in (model.submit_sync, lambda **g: model._submit(g, None)):  # known by then, and said at once
            with pytest.raises(RequestError) as caught:
                ask(x=np.ones((1, 3), np.float32))
            assert str(caught.value) == DEPENDENT
        model(x=np.ones((2, 3), np.float32))
    with aotc.load(artifact, device="cpu", max_batch_size=1) as model:
        x = np.ones((1, 3), np.float32)
        np.testing.assert_array_equal(model.submit_sync(x=x)["y"], model(x=x)["y"])


ROWS = {
    "the row before": lambda x: np.concatenate([x[:1], x[:-1]]),
    "sums": lambda x: np.cumsum(x, 0),
    "another order": lambda x: x[::-1],
    "the place": lambda x: x + np.arange(len(x))[:, None] * 100,
    "the number of rows": lambda x: x / len(x),
    "a branch": lambda x: x if x.sum() > -40 else -x,
}


@pytest.mark.parametrize("kind", ROWS)
def test_the_probe_finds_rows_that_are_not_apart(kind):
    with pytest.raises(RequestError) as caught:
        require_independent_rows(lambda given: [given[0] * 3, ROWS[kind](given[0])], [(5,)], ["f32"], 1, 8)
    assert str(caught.value) == DEPENDENT


@pytest.mark.parametrize(("low", "high", "sizes"), [(1, 8, {1, 2}), (3, 8, {3}), (1, 1, set())])
def test_the_probe_passes_rows_that_are_apart(low, high, sizes):
    dtypes, seen = ["f64", "f32", "f16", "bf16", "i64", "u8", "bool"], set()

    def run(given):
        assert [a.dtype for a in given] == [DTYPES[d] for d in dtypes]
        bits = given[3].astype(np.uint32) << 16
        assert np.isfinite(bits.view(np.float32)).all() and np.abs(bits.view(np.float32)).max() > 0.1
        seen.add(len(given[0]))
        return [np.tanh(given[0]).sum(1), given[4] + 1, given[6], given[3]]

    require_independent_rows(run, [(5,)] * len(dtypes), dtypes, low, high)
    assert seen == sizes


def _say(model, given, queue):
    try:
        model.submit_sync(**given)
    except RequestError as error:
        queue.put(str(error))
    model.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_process_submit_raises(folder):
    with aotc.load(folder, device="cpu") as model:
        model.submit_sync(**arrays(1, 1, 0))
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_say, args=(model, arrays(1, 1, 0), queue))
        with model._batcher._changed:  # as by another thread that submits
            child.start()
        assert queue.get() == "the model was loaded before this process was forked off: load it again here, after the fork"
        child.join()
        assert child.exitcode == 0
        model.submit_sync(**arrays(1, 1, 0))


def test_a_model_that_is_dropped_goes_with_its_thread(folder, monkeypatch):
    monkeypatch.setattr(batch_worker, "_LINGER", 0.01)
    model = aotc.load(folder, device="cpu")
    model.submit_sync(**arrays(1, 1, 0))
    thread, gone = model._batcher._thread, weakref.ref(model)
    del model
    if thread is not None:
        thread.join(WAIT)
    gc.collect()
    assert gone() is None
