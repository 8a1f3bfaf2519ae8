"""Pages copied to host memory and back by a GPU: what was in them, and nothing else, moves; in the order of its stream,
and nobody waits for it who steps the engine."""

import threading

import numpy as np
import pytest
from fake_executor import COPY, expected, request, tokens
from late_cuda import LateDriver, TokenModel

from aotc.errors import DeviceLostError, RequestError
from aotc.runtime import cuda_executor
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.engine import Engine
from aotc.runtime.executor import CacheOptions
from aotc.runtime.offload import Costs, Offload

SAVED, LOADED = np.array([5, 0, 3, 6, 7], np.int32), np.array([1, 2, 7, 5, 3], np.int32)


@pytest.fixture
def paged(cuda_artifact, use_driver, monkeypatch):
    """paged(buffers, pages) -> (executor, driver, its pages): pinned memory of so many buffers, of so many pages each."""

    def make(buffers=4, pages=1, count=8):
        size = next(c.block_bytes for c in cuda_artifact.manifest.kv_caches if c.layout == "paged")
        monkeypatch.setattr(cuda_executor, "BUFFERS", buffers)
        monkeypatch.setattr(cuda_executor, "_COPY_BYTES", buffers * pages * size)
        driver = use_driver(LateDriver())
        executor = CudaExecutor(cuda_artifact, 2, CudaDevice(), CacheOptions("paged", count * size))
        executor.finish_warming()
        driver.late = True
        return executor, driver, np.ctypeslib.as_array(driver.blocks[executor._kv]).reshape(count, size)

    return make


def rest(executor):
    """Lets the thread do all that it can."""
    executor._pages.submit(lambda: None).result(30)


def save(executor, ids=SAVED):
    data = np.zeros((len(ids), executor.page_bytes), np.uint8)
    return data, executor.save_pages(ids, data)


def finish(executor, driver, copy):
    for _ in range(50):
        if not copy.go_on():
            break
        driver.work()
        rest(executor)
    driver.work()
    rest(executor)
    assert copy.go_on() == 0


@pytest.mark.parametrize(("buffers", "pages"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 100), (4, 100)])
def test_pages_come_back_as_they_were(paged, buffers, pages):
    executor, driver, kv = paged(buffers, pages)
    assert executor.memory.pinned == sum(map(len, driver.host.values()))
    kv[:] = np.random.default_rng(1).integers(0, 256, kv.shape, np.uint8)
    before, things = kv.copy(), (driver.allocations, driver.everything)
    data, copy = save(executor)
    finish(executor, driver, copy)
    np.testing.assert_array_equal(data, before[SAVED])
    assert copy.took == (5 * executor.page_bytes, pytest.approx(0.5e-3 * -(-5 // min(pages, -(-8 // buffers)))))
    kv[SAVED] = 0
    copy = executor.load_pages(data[1:], LOADED[1:])
    finish(executor, driver, copy)
    after = before.copy()
    after[SAVED] = 0
    after[LOADED[1:]] = before[SAVED[1:]]
    np.testing.assert_array_equal(kv, after)
    assert (driver.allocations, driver.everything) == things, "the device's memory was all taken at load"
    assert driver.waited == []


def test_pages_are_anybodys_once_their_copy_stands_in_the_stream(paged):
    """Two buffers hold two pages of five, the last ones; the others wait their turn."""
    executor, driver, kv = paged(buffers=2)
    kv[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    data, copy = save(executor)
    for _ in range(3):
        assert copy.go_on() == 3, "no buffer is free before the GPU has copied"
    for page in SAVED[3:]:
        executor.device.call("cuMemsetD8Async", executor._kv + int(page) * kv.shape[1], 99, kv.shape[1], executor.device.stream)
    assert kv[SAVED[3:], 0].tolist() == [7, 8] and not data.any(), "the GPU has done nothing yet"
    driver.work()
    rest(executor)
    assert kv[SAVED[3:], 0].tolist() == [99, 99] and data[:, 0].tolist() == [0, 0, 0, 7, 8]
    assert copy.go_on() == 1
    driver.work()
    rest(executor)
    assert copy.go_on() == 0
    driver.work()
    rest(executor)
    assert data[:, 0].tolist() == [6, 1, 4, 7, 8] and data.min(1).tolist() == data.max(1).tolist()


def test_pages_are_there_for_what_begins_after_their_copy(paged):
    """Memory that is copied back may be another's by the time at which the GPU copies it: buffers are not."""
    executor, driver, kv = paged(buffers=2)
    data = np.repeat(np.arange(1, 6, dtype=np.uint8)[:, None], kv.shape[1], 1)
    copy, busy = executor.load_pages(data, LOADED), threading.Event()
    executor._pages.submit(busy.wait, 10)
    for _ in range(3):
        assert copy.go_on() == 5, "a thread fills the buffers first, when it has time"
    busy.set()
    rest(executor)
    assert copy.go_on() == 3
    data[:2] = 77
    for _ in range(3):
        assert copy.go_on() == 3, "both buffers are on their way"
    driver.work()
    assert kv[LOADED[:2], 0].tolist() == [1, 2]
    finish(executor, driver, copy)
    assert kv[LOADED, 0].tolist() == [1, 2, 3, 4, 5] and driver.waited == []


@pytest.mark.parametrize("moment", ["filling", "filled", "copying"])
def test_buffers_of_a_copy_that_was_stopped_are_free(paged, moment):
    executor, driver, kv = paged(buffers=2)
    kv[:] = 9
    data = np.ones((5, kv.shape[1]), np.uint8)
    stopped, first = executor.load_pages(data, LOADED), executor._pages.take()
    executor._pages.free(first)
    assert stopped.go_on() == 5
    if moment != "filling":
        rest(executor)
    if moment == "copying":
        assert stopped.go_on() == 3
    stopped.stop()
    data, copy = save(executor, np.array([0], np.int32))
    finish(executor, driver, copy)
    assert (data == 9).all() and len(executor._pages._free) == 2
    assert (kv == 1).all(1).sum() == (2 if moment == "copying" else 0)


def test_after_a_step_that_was_interrupted_every_buffer_is_free(paged):
    executor, driver, _ = paged(buffers=3)
    assert executor.load_pages(np.ones((2, executor.page_bytes), np.uint8), LOADED[:2]).go_on() == 2
    assert save(executor)[1].go_on() == 4
    executor.settle()
    assert len(executor._pages._free) == 3
    data, copy = save(executor)
    finish(executor, driver, copy)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("buffers", "pages"), [(1, 1), (2, 1), (4, 2)])
def test_a_step_with_preemption_waits_for_nothing_but_steps(paged, monkeypatch, buffers, pages, ahead):
    """Two sequences of 4 pages each in a pool of 5, above a GPU that lags behind as it likes."""
    executor, driver, _ = paged(buffers, pages, count=5)
    monkeypatch.setattr(executor, "runs_ahead", ahead)
    TokenModel(executor, driver)
    engine, rng, out, slow = Engine(executor, (1,), costs=COPY, prefix_cache=False), np.random.default_rng(2), {}, 0
    prompts = {"old": [3] * 70, "young": [4] * 60}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=180, repetition_penalty=1.5))
    ended = {int(f.ended) for f in executor._frames}
    while engine.has_work:
        for output in engine.step():
            out.setdefault(output.request_id, []).append(output)
        slow += engine.scheduler.copying
        driver.work(int(rng.integers(0, 3)))
    assert {(name, event in ended) for name, event, *_ in driver.waited} == {("cuEventSynchronize", True)}
    assert len(driver.waited) <= len(driver.launched)
    assert engine.scheduler.preemptions == engine.offload.saves >= 1 and engine.offload.used == 0
    assert slow, "copies that took more than a step"
    assert engine.computed_tokens == 70 + 60 + 2 * 179, "nothing was computed again"
    assert {n: tokens(out, n) for n in prompts} == {n: expected(p, 180) for n, p in prompts.items()}
    rest(executor)
    assert len(executor._pages._free) == buffers and engine.scheduler.pool.free_pages == 5


def test_what_copies_cost_is_measured_on_the_gpu(paged):
    executor, driver, _ = paged()
    costs = Costs(1.0, 0.0)
    offload = Offload(executor, 1 << 30, costs, lambda: 0.0)
    saved = offload.save(SAVED, 5 * executor.page_size)
    finish(executor, driver, saved.copy)
    offload.load(saved, 0, LOADED)
    byte = 0.5e-3 / executor.page_bytes
    assert costs.byte == pytest.approx(0.2 * byte)
    finish(executor, driver, saved.copy)
    offload.drop(saved)
    assert costs.byte == pytest.approx(0.36 * byte) and offload.used == 0


def test_a_copy_that_fails_loses_the_device(paged):
    executor, driver, _ = paged()
    driver.failing["cuMemcpyDtoHAsync"] = 700
    with pytest.raises(DeviceLostError, match="failed in program copying pages"):
        save(executor)[1].go_on()


def test_a_copy_that_fails_on_the_gpu_loses_the_device_at_the_next_one(paged):
    executor, driver, _ = paged(buffers=2)
    driver.failing["cuEventSynchronize"] = 700
    _, copy = save(executor)
    with pytest.raises(DeviceLostError, match="failed in program copying pages: .*ILLEGAL_ADDRESS"):
        for _ in range(2):
            copy.go_on()
            rest(executor)


def test_a_closed_model_copies_nothing(paged):
    executor, driver, _ = paged()
    data, copy = save(executor)
    copy.go_on()
    driver.work()
    executor.close()
    for use in (lambda: save(executor), lambda: executor.load_pages(data, SAVED)):
        with pytest.raises(RequestError, match="was closed"):
            use()
