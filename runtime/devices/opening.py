"""Which device a model runs on, and a GPU that is opened beside other work: its context takes 0.1 to 0.2 s, hardly any
of them Python's."""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING

from aotc.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from aotc.artifact.reader import Artifact
    from aotc.runtime.devices.cuda import CudaDevice

DEVICE = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?", re.ASCII)
DEVICES = "auto, cpu, cuda or cuda:NUMBER"


class Opening(threading.Thread):
    """Opens a GPU in a thread of its own."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(name="aotc-opening")  # no daemon: a process must not end within a call of the driver
        self._number = number
        self._device: CudaDevice | None = None
        self._error: BaseException | None = None
        self._at_work = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            from aotc.runtime.devices.cuda import CudaDevice

            self._device = CudaDevice(self._number, self._at_work.set)
        except BaseException as error:  # raised where the device is asked for
            self._error = error
        self._at_work.set()

    def wait_for_driver(self) -> None:
        """Waits until the driver makes the context, or has failed to: before work that keeps Python's lock, without which
        the driver goes on, and the rest of the opening does not."""
        self._at_work.wait()

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
