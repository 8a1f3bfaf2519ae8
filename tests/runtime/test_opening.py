"""A GPU's context is made beside the imports, by the driver's library itself, and a model is not held up by it."""

import ctypes
import threading
from types import SimpleNamespace

import pytest

import aotc
from aotc.errors import DeviceError
from aotc.runtime.devices import opening
from aotc.runtime.devices.opening import Opening
from aotc.runtime.tokenizer import Tokenizer


class Library:
    """libcuda.so.1 with one GPU: what was called, and what fails."""

    def __init__(self, **failing):
        self.called, self.failing, self.go_on = [], failing, threading.Event()
        self.go_on.set()
        for name in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"):
            setattr(self, name, lambda *arguments, name=name: self.call(name, arguments))

    def call(self, name, arguments):
        self.called.append(name)
        if name == "cuDeviceGet":
            arguments[0]._obj.value = 40 + arguments[1]
        if name.startswith("cuDevicePrimary"):
            assert arguments[-1].value == 41
        if name == "cuDevicePrimaryCtxRetain":
            assert self.go_on.wait(60)
        return self.failing.get(name, 0)


@pytest.fixture
def library(monkeypatch):
    """library(**failing): it is found as libcuda.so.1."""

    def use(**failing):
        made = Library(**failing)
        found = {**vars(ctypes), "CDLL": lambda name: {"libcuda.so.1": made}[name]}
        monkeypatch.setattr(opening, "ctypes", SimpleNamespace(**found))
        return made

    return use


RETAINED = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(
    ("failing", "called"),
    [
        ({}, [*RETAINED, "cuDevicePrimaryCtxRelease_v2"]),
        ({"cuInit": 100}, RETAINED[:1]),
        ({"cuDeviceGet": 101}, RETAINED[:2]),
        ({"cuDevicePrimaryCtxRetain": 2}, RETAINED),
    ],
)
def test_an_early_context_is_given_back_once_there_is_a_device(fake_driver, library, failing, called):
    driver, found = fake_driver(gpus=2), library(**failing)
    begun = Opening(1)
    begun.wait_for_driver()
    device = begun.result()
    assert found.called == called and driver.opened == [1] and driver.contexts == 1
    device.close()


def test_a_driver_without_the_functions_is_left_to_the_device(fake_driver, monkeypatch):
    driver = fake_driver()
    monkeypatch.setattr(opening, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: SimpleNamespace()}))
    Opening().result().close()
    assert driver.everything == {}


def test_what_fails_is_said_and_the_early_context_given_back(fake_driver, library):
    driver, found = fake_driver(gpus=2, version=12020), library()
    with pytest.raises(DeviceError, match="at least 12.3 is needed"):
        Opening(1).result()
    assert found.called[-1] == "cuDevicePrimaryCtxRelease_v2" and driver.everything == {}


def test_nobody_waits_for_bindings_that_are_not_there(use_driver, library, monkeypatch):
    library()

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    begun = Opening(1)
    begun.wait_for_driver()
    with pytest.raises(DeviceError, match="needs cuda-bindings"):
        begun.result()


def test_the_tokenizer_is_read_while_the_driver_makes_the_context(cuda_artifact, fake_driver, library, monkeypatch):
    fake_driver(gpus=2)
    found, seen = library(), []
    found.go_on.clear()

    class Watched(Tokenizer):
        def __init__(self, *arguments):
            seen.extend(found.called)
            super().__init__(*arguments)
            found.go_on.set()

    monkeypatch.setattr("aotc.runtime.tokenizer.Tokenizer", Watched)
    aotc.load(cuda_artifact.path, device="cuda:1", max_num_seqs=1).close()
    assert seen in (RETAINED[:2], RETAINED), "the call itself may be a moment away"
