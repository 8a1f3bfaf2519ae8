"""Kernels whose blocks wait for one another, of several models on one GPU.

Such a kernel needs a place for each of its blocks at once. Two of them at the same time could each have half of the places
and wait for the rest for ever; so programs that have such kernels run one after the other, in whatever streams.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from aotc.errors import DeviceError
from aotc.runtime.devices.driver import CU_EVENT_DISABLE_TIMING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aotc.runtime.devices.cuda import CudaDevice
    from aotc.runtime.devices.driver import Driver


class Turns:
    """Of one GPU in this process. With one stream alone nothing is waited for, and nothing is recorded."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False
        self._left: list[tuple[Driver, int]] = []
        self._programs: Counter[int] = Counter()  # by stream
        self._events: dict[int, Any] = {}  # by stream: after its latest program
        self._latest: int | None = None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time. A device may be collected in the middle, in this very thread: its streams are forgotten when
        nobody looks at their events."""
        with self._lock:
            self._busy = True
            try:
                yield
            finally:
                while self._left:
                    self._forget(*self._left.pop())
                self._busy = False

    def join(self, device: CudaDevice) -> None:
        """Notes a program that will run in a device's stream, until what the device made is given back."""
        stream = int(device.stream)
        with self._alone():
            if stream not in self._events:
                device.call("cuCtxSynchronize")  # of what others launched while they were alone nothing is recorded
                self._events[stream] = device.call("cuEventCreate", CU_EVENT_DISABLE_TIMING)
            self._programs[stream] += 1
        device.hold(self._leave, (device.driver, stream))

    def _leave(self, program: tuple[Driver, int]) -> None:
        """What the program had to do has ended."""
        with self._lock:
            self._left.append(program)
            if not self._busy:
                with self._alone():
                    pass

    def _forget(self, driver: Driver, stream: int) -> None:
        self._programs[stream] -= 1
        if self._programs[stream]:
            return
        if self._latest == stream:
            self._latest = None
        with contextlib.suppress(DeviceError):  # after a device error all of it fails
            driver.cuEventDestroy(self._events.pop(stream))

    def run(self, device: CudaDevice, launch: Callable[[], None]) -> None:
        """Launches a program when those of other streams have ended."""
        with self._alone():
            if len(self._events) == 1:
                launch()
                return
            stream = int(device.stream)
            if self._latest not in (None, stream):
                device.call("cuStreamWaitEvent", device.stream, self._events[self._latest], 0)
            try:
                launch()
            finally:  # a part of it may run
                device.call("cuEventRecord", self._events[stream], device.stream)
                self._latest = stream


_all: dict[int, Turns] = {}
_guard = threading.Lock()


def _begin_anew() -> None:
    """In a forked process, where nothing of a GPU can be used, whoever held a lock is gone."""
    global _guard
    _guard = threading.Lock()
    for turns in _all.values():
        turns._lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


def turns_of(device: CudaDevice) -> Turns:
    """Those of a device's context, which a program in its stream joins."""
    with _guard:
        turns = _all.setdefault(int(device.context), Turns())
    turns.join(device)
    return turns
