"""Pages copied to host memory and back, on either device: what was in them, and nothing else, moves."""

import numpy as np
import pytest

from aotc.errors import DeviceLostError, RequestError
from aotc.runtime import cuda_executor
from aotc.runtime.cuda_executor import CudaExecutor
from aotc.runtime.executor import CacheOptions

SAVED, LOADED = np.array([5, 0, 3, 6, 7], np.int32), np.array([1, 2, 7, 5, 3], np.int32)


def blocks_of(driver, executor):
    return np.ctypeslib.as_array(driver.blocks[executor._kv]).reshape(executor.num_pages, executor.page_bytes)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 100])
def test_pages_come_back_as_they_were(cuda_artifact, gpu, monkeypatch, parts):
    device, driver = gpu()
    least = CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged"))
    monkeypatch.setattr(cuda_executor, "_COPY_BYTES", parts * least.page_bytes)
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged"))
    assert executor.memory.pinned == sum(map(len, driver.host.values()))
    pages = blocks_of(driver, executor)
    pages[:] = np.random.default_rng(1).integers(0, 256, pages.shape, np.uint8)
    before, things = pages.copy(), (driver.allocations, driver.everything)
    saved = executor.save_pages(SAVED)
    assert saved.shape == (5, executor.page_bytes)
    pages[SAVED] = 0
    executor.load_pages(saved[1:], LOADED[1:])
    after = before.copy()
    after[SAVED] = 0
    after[LOADED[1:]] = before[SAVED[1:]]
    np.testing.assert_array_equal(pages, after)
    assert (driver.allocations, driver.everything) == things, "the device's memory was all taken at load"


def test_a_copy_that_fails_loses_the_device(cuda_artifact, gpu):
    device, driver = gpu()
    executor = CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged"))
    driver.failing["cuMemcpyDtoHAsync"] = 700
    with pytest.raises(DeviceLostError, match="failed in program copying pages"):
        executor.save_pages(SAVED)


def test_a_closed_model_copies_nothing(cuda_artifact, gpu):
    device, _ = gpu()
    executor = CudaExecutor(cuda_artifact, 2, device, CacheOptions("paged"))
    saved = executor.save_pages(SAVED)
    executor.close()
    for use in (lambda: executor.save_pages(SAVED), lambda: executor.load_pages(saved, SAVED)):
        with pytest.raises(RequestError, match="was closed"):
            use()
