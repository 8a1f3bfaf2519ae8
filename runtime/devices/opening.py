"""Which device a model runs on, and a GPU that is opened beside other work: its context takes 0.1 to 0.2 s, hardly any
of them Python's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from typing import TYPE_CHECKING

from aotc.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aotc.artifact.reader import Artifact
    from aotc.runtime.devices.cuda import CudaDevice

DEVICE = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?", re.ASCII)
DEVICES = "auto, cpu, cuda or cuda:NUMBER"


class _EarlyContext(threading.Thread):
    """Begins to make a GPU's primary context while the driver's bindings are still being imported, which needs Python's
    lock as much as all other imports do. `CudaDevice` makes the same one again, which takes no time then, and says what
    is wrong where something is."""

    def __init__(self, number: int) -> None:
        super().__init__(name="aotc-context")
        self.at_work = threading.Event()
        """Set from where the driver works on its own: it needs Python's lock only once more, to return."""
        self._number, self._release = number, lambda: None
        self.seconds = 0.0  # that it took
        self.start()

    def run(self) -> None:
        begin = time.perf_counter()
        with contextlib.suppress(OSError, AttributeError):  # no driver, or one that is too old
            driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
            if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), self._number):
                release = driver.cuDevicePrimaryCtxRelease_v2
                self.at_work.set()
                if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                    self._release = lambda: release(device)
        self.seconds = time.perf_counter() - begin
        self.at_work.set()

    def give_back(self) -> None:
        """Waits until it is made, and lets go of it; more than once does no harm."""
        self.join()
        release, self._release = self._release, lambda: None
        release()


class Opening(threading.Thread):
    """Opens a GPU in a thread of its own."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(name="aotc-opening")  # no daemon: a process must not end within a call of the driver
        self._number = number
        self._device: CudaDevice | None = None
        self._error: BaseException | None = None
        self._imported = threading.Event()
        self._early = _EarlyContext(number)
        self.start()

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            with self._importing():
                from aotc.runtime.devices.cuda import CudaDevice, import_driver

                import_driver()
            bindings = time.perf_counter() - begin
            device = CudaDevice(self._number)
            context = time.perf_counter() - begin
            self._early.give_back()
            device.opened = {"bindings": bindings, "driver": self._early.seconds, "context": context}
            self._device = device
        except BaseException as error:  # raised where the device is asked for
            self._error = error
            self._early.give_back()

    @contextlib.contextmanager
    def _importing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._imported.set()

    def wait_for_driver(self) -> None:
        """Waits until the driver makes the context on its own, or has ended: before work that keeps Python's lock, for
        which the rest of the opening would have to wait."""
        self._imported.wait()
        self._early.at_work.wait()

    def result(self) -> CudaDevice:
        """The device, once. Raises what opening it raised, DeviceError above all."""
        self.join()
        if self._error is not None:
            raise self._error
        device, self._device = self._device, None
        assert device is not None
        return device


def begin_opening(path: str | Path, device: str) -> Opening | None:
    """Begins to open the GPU where an artifact that is yet to be read will ask for it."""
    found = DEVICE.fullmatch(device)
    if found is None or device == "cpu" or device == "auto" and not _has_gpu_code(path):
        return None
    return Opening(int(found[1] or 0))


def _has_gpu_code(path: str | Path) -> bool:
    """A first look, which the manifest confirms or not."""
    try:
        return any(name.startswith("sm") for name in os.listdir(os.path.join(path, "plans")))
    except (OSError, ValueError):  # no artifact: the reader says so
        return False


def choose_device(artifact: Artifact, device: str, opening: Opening | None = None) -> CudaDevice | None:
    """The GPU that a model runs on, None for the CPU. Raises RequestError for an unknown name, DeviceError where the
    GPU is needed and cannot be had."""
    found = DEVICE.fullmatch(device)
    if found is None:
        raise RequestError(f"device must be {DEVICES}, got {device[:40]!r}")
    inside = {t.device for t in artifact.manifest.targets}
    if device == "cpu" or inside == {"cpu"} and device == "auto":
        return None
    try:
        return (opening or Opening(int(found[1] or 0))).result()
    except DeviceError:
        if device != "auto" or "cpu" not in inside:
            raise
        return None
