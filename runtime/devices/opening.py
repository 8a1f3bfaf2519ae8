"""Which device a model runs on, and a GPU that is opened beside other work: its context takes 0.1 to 0.2 s, hardly any
of them Python's."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from aotc.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from aotc.artifact.reader import Artifact
    from aotc.runtime.devices.cuda import CudaDevice

DEVICES = ("auto", "cpu", "cuda")


class Opening(threading.Thread):
    """Opens the GPU in a thread of its own."""

    def __init__(self) -> None:
        super().__init__(name="aotc-opening")  # no daemon: a process must not end within a call of the driver
        self._device: CudaDevice | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            from aotc.runtime.devices.cuda import CudaDevice

            self._device = CudaDevice()
            self._device.opened_in = time.perf_counter() - begin
        except BaseException as error:  # raised where the device is asked for
            self._error = error

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
    return Opening() if device == "cuda" or device == "auto" and _has_gpu_code(path) else None


def _has_gpu_code(path: str | Path) -> bool:
    """A first look, which the manifest confirms or not."""
    try:
        return any(name.startswith("sm") for name in os.listdir(os.path.join(path, "plans")))
    except (OSError, ValueError):  # no artifact: the reader says so
        return False


def choose_device(artifact: Artifact, device: str, opening: Opening | None = None) -> CudaDevice | None:
    """The GPU that a model runs on, None for the CPU. Raises RequestError for an unknown name, DeviceError where the
    GPU is needed and cannot be had."""
    if device not in DEVICES:
        raise RequestError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    inside = {t.device for t in artifact.manifest.targets}
    if device == "cpu" or inside == {"cpu"} and device == "auto":
        return None
    try:
        return (opening or Opening()).result()
    except DeviceError:
        if device == "cuda" or "cpu" not in inside:
            raise
        return None
