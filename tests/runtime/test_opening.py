"""A GPU's context is made in a thread beside other work, and a model is not held up by it."""

import threading

import pytest
from fake_cuda import FakeDriver

import aotc
from aotc.errors import DeviceError
from aotc.runtime.devices.opening import Opening
from aotc.runtime.tokenizer import Tokenizer


class Slow(FakeDriver):
    """Makes its context once it is told to."""

    def __init__(self, **options):
        super().__init__(**options)
        self.go_on = threading.Event()

    def __getattr__(self, name):
        if name == "cuDevicePrimaryCtxRetain":
            assert self.go_on.wait(60)
        return super().__getattr__(name)


def test_waiting_ends_while_the_driver_makes_the_context(use_driver):
    driver = use_driver(Slow(gpus=2))
    begun = Opening(1)
    begun.wait_for_driver()
    assert driver.opened == [1] and driver.contexts == 0
    driver.go_on.set()
    device = begun.result()
    assert driver.contexts == 1 and 0 <= device.opened["driver"] <= device.opened["context"]
    device.close()
    assert driver.everything == {}


@pytest.mark.parametrize(
    ("options", "failing", "message"),
    [
        ({}, {"cuInit": 100}, "CUDA_ERROR_NO_DEVICE in cuInit"),
        ({"version": 12020}, {}, "at least 12.3 is needed"),
        ({}, {"cuDevicePrimaryCtxRetain": 2}, "CUDA_ERROR_OUT_OF_MEMORY in cuDevicePrimaryCtxRetain: other processes"),
        ({}, {"cuStreamCreate": 2}, "CUDA_ERROR_OUT_OF_MEMORY in cuStreamCreate"),
    ],
)
def test_nobody_waits_for_what_has_failed_and_it_is_said(fake_driver, options, failing, message):
    driver = fake_driver(**options)
    driver.failing.update(failing)
    begun = Opening()
    begun.wait_for_driver()
    with pytest.raises(DeviceError, match=message):
        begun.result()
    del begun
    assert driver.everything == {}


def test_the_tokenizer_is_read_while_the_driver_makes_the_context(cuda_artifact, use_driver, monkeypatch):
    driver, seen = use_driver(Slow(gpus=2)), []

    class Watched(Tokenizer):
        def __init__(self, *arguments):
            seen.append((driver.opened, driver.contexts))
            super().__init__(*arguments)
            driver.go_on.set()

    monkeypatch.setattr("aotc.runtime.tokenizer.Tokenizer", Watched)
    aotc.load(cuda_artifact.path, device="cuda:1", max_num_seqs=1).close()
    assert seen == [([1], 0)]
