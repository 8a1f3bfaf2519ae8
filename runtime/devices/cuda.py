"""NVIDIA GPUs through the driver's API: the context, memory, copies, and what goes wrong.

Neither torch nor Triton is needed. CUDA Driver API: https://docs.nvidia.com/cuda/cuda-driver-api/. numpy is imported
where it is used: a context is made while it is still being imported.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from aotc import knobs
from aotc.errors import ArtifactError, DeviceError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from aotc.artifact.manifest import TargetEntry
    from aotc.artifact.reader import Artifact

MIN_DRIVER = 12030  # as cuDriverGetVersion counts: 12.3, the first with programmatic edges in graphs
_CLOSED = "the model was closed: load it again"
_HINTS = {
    2: "other processes hold its memory: look at nvidia-smi",
    34: "libcuda.so.1 is a stub of the toolkit: install a driver, or take the stub off LD_LIBRARY_PATH",
    46: "another process holds it alone: look at nvidia-smi",
    100: "the NVIDIA driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "the NVIDIA driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    209: "the code is for another GPU: compile the model again",
    802: "the machine's switches are not ready: start nvidia-fabricmanager",
    803: "the driver's library and its kernel module differ: restart the machine or install them again",
    804: "a forward-compatible libcuda.so.1 does not support this GPU: take it off LD_LIBRARY_PATH",
}
"""What to do about a CUresult."""

log = logging.getLogger("aotc.cuda")


def import_driver() -> Any:
    """The driver's bindings. Raises DeviceError where there are none."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise DeviceError("running on a GPU needs cuda-bindings: pip install 'aotc[cuda]'") from None


class CudaDevice:
    """One of the GPUs that CUDA_VISIBLE_DEVICES leaves, by its number. Threads that use it call `enter` first.

    All that is made through it is given back by `close`, or when nobody refers to it any more. Raises DeviceError
    where there is no driver, no such GPU, or a driver that is too old.
    """

    def __init__(self, number: int = 0) -> None:
        self.driver = driver = import_driver()
        try:
            code = driver.cuInit(0)[0]
        except RuntimeError:
            raise DeviceError("there is no NVIDIA driver here (libcuda.so.1 does not load)") from None
        self._check(code, "cuInit")
        count = self.call("cuDeviceGetCount")
        if not count:
            raise DeviceError(_HINTS[100])
        if number >= count:
            there = "the one GPU here is cuda:0" if count == 1 else f"the GPUs here are cuda:0 to cuda:{count - 1}"
            raise DeviceError(f"there is no cuda:{number}: {there}")
        version = self.call("cuDriverGetVersion")
        if version < MIN_DRIVER:
            here, least = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MIN_DRIVER))
            raise DeviceError(f"the NVIDIA driver is for CUDA {here}, at least {least} is needed: install a newer driver")
        self.device = self.call("cuDeviceGet", number)
        self.name = self.call("cuDeviceGetName", 128, self.device).split(b"\0")[0].decode()
        kind = driver.CUdevice_attribute
        self.capability = tuple(
            self.call("cuDeviceGetAttribute", a, self.device)
            for a in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )  # fmt: skip
        self.multiprocessors = self.call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self.device)
        self.synchronous = knobs.sync()
        self._whole: CudaDevice | None = None  # what a scope is a part of, and keeps alive
        self.failure: str | None = None  # why nothing runs on it any more
        self.steps = 0
        self.opened: dict[str, float] = {}  # seconds of parts of the opening, where somebody measured them
        self._threads = threading.local()
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self._held: Any = []  # (the function that gives back, what) in the order in which they were made
        self._finalizer = weakref.finalize(self, _give_back, driver, self.device, self.context, self._held)
        self._finalizer.atexit = False  # the driver itself frees what a process leaves behind, and faster
        self.enter()
        self.stream = self.hold("cuStreamDestroy", self.call("cuStreamCreate", 1))  # CU_STREAM_NON_BLOCKING

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver; its result, or a tuple of several. Raises DeviceError where it fails."""
        try:
            code, *results = getattr(self.driver, name)(*arguments)
        except RuntimeError as error:  # what cuda-bindings raises for a function that libcuda.so.1 lacks
            raise DeviceError(f"the NVIDIA driver is too old ({error}): install a newer one") from None
        if code:
            self._check(code, name)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, code: Any, name: str) -> None:
        if int(code):
            hint = _HINTS.get(int(code))
            raise DeviceError(f"the GPU reports {code.name} in {name}{f': {hint}' if hint else ''}")

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
        address = self.hold("cuMemFree", int(self.call("cuMemAlloc", nbytes)))
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

        address = int(self.call("cuMemHostAlloc", max(nbytes, 1), 3))  # PORTABLE | DEVICEMAP
        block = (ctypes.c_uint8 * max(nbytes, 1)).from_address(address)
        block.device = self  # type: ignore[attr-defined]  # not collected while somebody sees its memory
        return np.ctypeslib.as_array(block)[:nbytes]

    def upload(self, address: int, data: np.ndarray, stream: Any = None) -> None:
        """Copies contiguous host memory to the device, in stream order."""
        self.call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, stream or self.stream)

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


def _give_back(driver: Any, device: Any, context: Any, held: list[tuple[Any, Any]]) -> None:
    """Releases, newest first. What the driver says is of no use: after a device error all of it fails."""
    driver.cuCtxPushCurrent(context)  # of whichever thread this is
    for _, stream in (h for h in held if h[0] == "cuStreamDestroy"):
        driver.cuStreamSynchronize(stream)
    while held:
        release, thing = held.pop()
        (release if callable(release) else getattr(driver, release))(thing)
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(device)
