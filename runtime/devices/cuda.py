"""NVIDIA GPUs through the driver's API: the context, memory, copies, and what goes wrong.

Neither torch nor Triton is needed. CUDA Driver API: https://docs.nvidia.com/cuda/cuda-driver-api/. numpy is imported
where it is used: a context is made while it is still being imported.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from aotc import knobs
from aotc.errors import ArtifactError, DeviceError, DeviceLostError
from aotc.runtime.devices import driver as api
from aotc.runtime.devices.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from aotc.artifact.manifest import TargetEntry
    from aotc.artifact.reader import Artifact

MIN_DRIVER = 12030  # as cuDriverGetVersion counts: 12.3, the first with programmatic edges in graphs
_CLOSED = "the model was closed: load it again"

log = logging.getLogger("aotc.cuda")


class CudaDevice:
    """One of the GPUs that CUDA_VISIBLE_DEVICES leaves, by its number. Threads that use it call `enter` first.

    All that is made through it is given back by `close`, or when nobody refers to it any more. Raises DeviceError
    where there is no driver, no such GPU, or a driver that is too old.
    """

    def __init__(self, number: int = 0, at_work: Callable[[], object] = lambda: None) -> None:
        """`at_work` is called right before the driver makes the context, for which it needs no Python."""
        begin = time.perf_counter()
        self.driver = Driver()
        self.call("cuInit", 0)
        self.opened = {"driver": time.perf_counter() - begin}
        """Seconds until the driver was there, and until the context was (`context`)."""
        self.device = self._find(number)
        self.synchronous = knobs.sync()
        self._whole: CudaDevice | None = None  # what a scope is a part of, and keeps alive
        self.failure: str | None = None  # why nothing runs on it any more
        self.steps = 0
        self._threads = threading.local()
        at_work()
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self._held: Any = []  # (the function that gives back, what) in the order in which they were made
        self._finalizer = weakref.finalize(self, _give_back, self.driver, self.device, self.context, self._held)
        self._finalizer.atexit = False  # the driver itself frees what a process leaves behind, and faster
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        self.opened["context"] = time.perf_counter() - begin

    def _begin(self) -> None:
        self.enter()
        self.stream = self.hold("cuStreamDestroy", self.call("cuStreamCreate", api.CU_STREAM_NON_BLOCKING))
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), self.device)
        self.name = name.value.decode()
        self.capability = (
            self.call("cuDeviceGetAttribute", api.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device),
            self.call("cuDeviceGetAttribute", api.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device),
        )
        self.multiprocessors = self.call("cuDeviceGetAttribute", api.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self.device)

    def _find(self, number: int) -> int:
        """The driver's own number of the GPU. Raises DeviceError where it is not there, or the driver too old."""
        count = self.call("cuDeviceGetCount")
        if not count:
            raise DeviceError(api.HINTS[100])
        if number >= count:
            there = "the one GPU here is cuda:0" if count == 1 else f"the GPUs here are cuda:0 to cuda:{count - 1}"
            raise DeviceError(f"there is no cuda:{number}: {there}")
        version = self.call("cuDriverGetVersion")
        if version < MIN_DRIVER:
            here, least = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MIN_DRIVER))
            raise DeviceError(f"the NVIDIA driver is for CUDA {here}, at least {least} is needed: install a newer driver")
        return self.call("cuDeviceGet", number)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver; its result, or a tuple of several. Raises DeviceError where it fails."""
        return getattr(self.driver, name)(*arguments)

    def hold(self, release: str | Callable[[Any], None], thing: Any) -> Any:
        """Notes what gives `thing` back when the device is closed: a function of the driver, by its name, or another one.
        Returns the thing."""
        self._held.append((release, thing))
        return thing

    def scope(self, stream: Any = None) -> CudaDevice:
        """This device, as seen by what is given back before it: `release` of the scope returns all that was made
        through it. `stream` takes the place of the device's own, which is then the caller's to keep."""
        scope = copy.copy(self)
        scope._held, scope._whole = _Scope(self._held), self
        if stream is not None:
            scope.stream = stream
        return scope

    def release(self) -> None:
        """Gives back what was made through this scope, newest first. Nothing of it must be in use any more."""
        self.call("cuCtxSetCurrent", self.context)
        for release, thing in self._held.take():
            if callable(release):
                release(thing)
            else:
                self.call(release, thing)

    def close(self) -> None:
        """Gives everything back: memory of both sides, graphs, modules, the stream, the context. Arrays of `pinned`
        must not be touched afterwards. May be called more than once."""
        self.failure = _CLOSED
        self._finalizer()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def enter(self) -> None:
        """Makes the device's context that of the calling thread. Raises DeviceError after `close` or a failure."""
        if self.failure is not None:
            raise (DeviceError if self.closed else DeviceLostError)(self.failure)
        if not hasattr(self._threads, "entered"):
            self.call("cuCtxSetCurrent", self.context)
            self._threads.entered = True

    def fail(self, program: str, error: DeviceError, step: int | None = None) -> DeviceLostError:
        """What to raise where a step failed. Nothing runs afterwards: a context is not usable after most errors, and
        what the caches of running sequences hold is not known after any."""
        advice = "" if self.synchronous else "; with AOTC_SYNC=1 the kernel is named"
        which = self.steps if step in (None, self.steps) else f"{step} or {self.steps}"  # what began later may be at fault
        self.failure = f"step {which} failed in program {program}: {error}; load the model in a new process{advice}"
        return DeviceLostError(self.failure)

    def synchronize(self) -> None:
        """Waits for everything in the stream."""
        self.call("cuStreamSynchronize", self.stream)

    def target_of(self, artifact: Artifact) -> TargetEntry:
        """The artifact's target for this GPU: its own architecture, else an older one of the same major version,
        which is said in a warning. Raises ArtifactError listing what is inside."""
        major, minor = self.capability
        here = f"sm{major}{minor}"
        inside = {t.name: t for t in artifact.manifest.targets if t.device == "cuda"}
        asked = knobs.target()
        if asked is not None:
            if asked not in inside:
                raise ArtifactError(f"AOTC_TARGET is {asked!r}, and {artifact.path} was compiled for {', '.join(inside)}")
            return inside[asked]
        fit = [n for n in inside if n == here or (major == 8 and n.startswith("sm8") and int(n[2:]) <= 80 + minor)]
        if not fit:
            names = ", ".join(t.name for t in artifact.manifest.targets)
            raise ArtifactError(
                f"{artifact.path} was compiled for {names}; this GPU is {here} ({self.name}): "
                f"compile the model again with --arch {here}"
            )
        best = inside[max(fit)]
        if best.name != here:
            log.warning(
                "%s runs untuned on this %s (%s) with the code of %s: compile it with --arch %s",
                artifact.path, self.name, here, best.name, here,
            )  # fmt: skip
        return best

    def require(self, needed: int, artifact: Artifact, advice: str) -> None:
        """Raises DeviceError where less than `needed` bytes are free."""
        free = self.call("cuMemGetInfo")[0]
        if needed > free:
            raise DeviceError(
                f"{artifact.path} needs {needed / 1e9:.3f} GB on the GPU and {free / 1e9:.3f} GB are free: {advice}"
            )

    def allocate(self, nbytes: int, zero: bool = True) -> int:
        """Device memory, zeroed in stream order; its address, a multiple of 256 (0 for no bytes)."""
        if not nbytes:
            return 0
        address = self.hold("cuMemFree", self.call("cuMemAlloc", nbytes))
        if zero:
            self.call("cuMemsetD8Async", address, 0, nbytes, self.stream)
        return address

    def pinned(self, nbytes: int) -> np.ndarray:
        """Zeroed memory of the host that the GPU reads and writes under the same address, as bytes."""
        array = self.pin(nbytes)
        self.hold("cuMemFreeHost", array.ctypes.data)
        array[:] = 0
        return array

    def pin(self, nbytes: int) -> np.ndarray:
        """The same, not zeroed, and the caller's to give back with cuMemFreeHost."""
        import numpy as np

        flags = api.CU_MEMHOSTALLOC_PORTABLE | api.CU_MEMHOSTALLOC_DEVICEMAP
        address = self.call("cuMemHostAlloc", max(nbytes, 1), flags)
        block = (ctypes.c_uint8 * max(nbytes, 1)).from_address(address)
        block.device = self  # type: ignore[attr-defined]  # not collected while somebody sees its memory
        return np.ctypeslib.as_array(block)[:nbytes]

    def upload(self, address: int, data: np.ndarray, stream: Any = None) -> None:
        """Copies contiguous host memory to the device, in stream order."""
        self.call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, self.stream if stream is None else stream)

    def download(self, data: np.ndarray, address: int) -> None:
        """Copies device memory into contiguous host memory, in stream order."""
        self.call("cuMemcpyDtoHAsync", data.ctypes.data, address, data.nbytes, self.stream)


class _Scope:
    """What a scope made; the device knows of it too, and returns it where the scope did not."""

    def __init__(self, all_held: list[tuple[Any, Any]]) -> None:
        self._all, self._own = all_held, []

    def append(self, entry: tuple[Any, Any]) -> None:
        self._all.append(entry)
        self._own.append(entry)

    def take(self) -> Iterator[tuple[Any, Any]]:
        while self._own:
            entry = self._own.pop()
            for at in reversed(range(len(self._all))):
                if self._all[at] is entry:
                    del self._all[at]
            yield entry


def _give_back(driver: Driver, device: int, context: int, held: list[tuple[Any, Any]]) -> None:
    """Releases, newest first. What the driver says is of no use: after a device error all of it fails."""

    def attempt(function: str, *arguments: Any) -> None:
        with contextlib.suppress(DeviceError):
            getattr(driver, function)(*arguments)

    attempt("cuCtxPushCurrent", context)  # of whichever thread this is
    for _, stream in (h for h in held if h[0] == "cuStreamDestroy"):
        attempt("cuStreamSynchronize", stream)
    while held:
        release, thing = held.pop()
        if callable(release):
            release(thing)
        else:
            attempt(release, thing)
    attempt("cuCtxPopCurrent")
    attempt("cuDevicePrimaryCtxRelease", device)
