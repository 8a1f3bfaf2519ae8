"""Kernels whose blocks wait for one another, of several models on one GPU.

Such a kernel needs a place for each of its blocks at once. Two of them at the same time could each have half of the places
and wait for the rest for ever; so programs that have such kernels run one after the other, in whatever streams.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from aotc.runtime.devices.driver import CU_EVENT_DISABLE_TIMING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aotc.runtime.devices.cuda import CudaDevice


class Turns:
    """Of one GPU in this process. With one program's stream alone nothing is waited for, and nothing is recorded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, Any] = {}  # by stream: after its latest program
        self._latest: int | None = None

    def join(self, device: CudaDevice) -> None:
        """Notes a device's stream, in which such programs will run, until what the device made is given back."""
        with self._lock:
            stream = int(device.stream)
            if stream in self._events:
                return
            device.call("cuCtxSynchronize")  # of what others launched while they were alone nothing is recorded
            self._events[stream] = device.call("cuEventCreate", CU_EVENT_DISABLE_TIMING)
        device.hold("cuEventDestroy", self._events[stream])
        device.hold(self._leave, stream)

    def _leave(self, stream: int) -> None:
        """What the stream had to do has ended."""
        with self._lock:
            del self._events[stream]
            if self._latest == stream:
                self._latest = None

    def run(self, device: CudaDevice, launch: Callable[[], None]) -> None:
        """Launches a program when those of other streams have ended."""
        with self._lock:
            if len(self._events) == 1:
                launch()
                return
            stream = int(device.stream)
            if self._latest not in (None, stream):
                device.call("cuStreamWaitEvent", device.stream, self._events[self._latest], 0)
            launch()
            device.call("cuEventRecord", self._events[stream], device.stream)
            self._latest = stream


_all: dict[int, Turns] = {}
_guard = threading.Lock()


def turns_of(device: CudaDevice) -> Turns:
    """Those of a device's context, which its stream joins."""
    with _guard:
        turns = _all.setdefault(int(device.context), Turns())
    turns.join(device)
    return turns
