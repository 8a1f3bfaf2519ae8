"""The CPU: a process-wide thread pool, memory, and programs run by one C call."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from aotc import knobs
from aotc.artifact.plan import Address, Call, Constant, DimValue, If, Plan
from aotc.errors import DeviceError

ABI = 1
_CALL, _BARRIER, _JUMP_IF_FALSE, _JUMP = range(4)
_SPEC = np.dtype([("kind", "i4"), ("index", "i4"), ("value", "i8")])
_STEP = np.dtype([("op", "i4"), ("target", "i4"), ("first", "i4"), ("count", "i4")])

_pool: int | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    """A forked process has none of the pool's threads: models that are loaded there make a pool of their own."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def thread_count() -> int:
    """Threads to use: AOTC_NUM_THREADS, or the CPUs of this process's affinity and cgroup quota."""
    return knobs.num_threads() or min(len(os.sched_getaffinity(0)), _cgroup_cpus())


def _cgroup_cpus() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return 1 << 30


def allocate(nbytes: int) -> np.ndarray:
    """Zeroed bytes, page aligned, outside Python's heap."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)


def address_of(array: np.ndarray) -> int:
    """Where a contiguous array begins: `array.ctypes.data`, in a quarter of its time."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or of no bytes
        return array.ctypes.data


class CpuLibrary:
    """A target's kernels. Loading one runs native code of the artifact: its hash was checked before."""

    def __init__(self, path: Path, scratch_bytes: int) -> None:
        try:
            # By path, the loader would take the library of an artifact that was replaced for this one. So that the
            # name is new, the descriptor stays open: libraries are never unloaded.
            self._dll = ctypes.CDLL(f"/proc/self/fd/{os.open(path, os.O_RDONLY | os.O_CLOEXEC)}")
        except OSError as error:
            raise DeviceError(f"{path} does not load here: {error}; compile the model again for this machine") from None
        abi = self._dll.aotc_abi()
        if abi != ABI:
            raise DeviceError(f"{path} has kernel interface {abi}, this runtime {ABI}: compile the model again")
        if self._dll.aotc_prepare():
            raise DeviceError("Linux does not let this process use AMX tiles: compile with --arch x86-64-v4-bf16")
        self._dll.aotc_pool_create.restype = ctypes.c_void_p
        arguments = [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64] + [
            ctypes.c_void_p] * 5 + [ctypes.c_int64, ctypes.c_void_p]  # fmt: skip
        self.run = self._dll.aotc_run
        self.run.argtypes, self.run.restype = arguments, None
        self.run_short = ctypes.PYFUNCTYPE(None, *arguments)(self.address("aotc_run"))
        """The same, and Python's lock is kept: to get it back from a busy thread can take 5 ms."""
        self.pool = self._shared_pool()
        self.alone = self._dll.aotc_pool_create(1)  # of the calling thread
        self.scratch_bytes = scratch_bytes
        self.scratch = allocate(scratch_bytes * thread_count())

    def _shared_pool(self) -> int:
        global _pool
        with _pool_lock:
            if _pool is None:
                _pool = self._dll.aotc_pool_create(thread_count())
                if not _pool:
                    raise DeviceError(f"cannot start {thread_count()} threads: set AOTC_NUM_THREADS lower")
            return _pool

    def address(self, symbol: str) -> int:
        """Address of a kernel."""
        try:
            return ctypes.cast(getattr(self._dll, symbol), ctypes.c_void_p).value or 0
        except AttributeError:
            raise DeviceError(f"the kernel library has no {symbol}: compile the model again") from None


class CpuProgram:
    """A plan made ready: flat arrays that the C walker reads. Running allocates nothing and calls Python once."""

    def __init__(self, plan: Plan, library: CpuLibrary) -> None:
        self.plan, self._library = plan, library
        steps: list[tuple[int, int, int, int]] = []
        specs: list[tuple[int, int, int]] = []
        _flatten(plan.body, steps, specs)
        self._steps, self._specs = np.array(steps, _STEP), np.array(specs, _SPEC)
        self._resolved = np.zeros(len(specs), np.uint64)
        self._kernels = np.array([library.address(k.symbol) for k in plan.kernels], np.uint64)
        self._bases = np.zeros(len(plan.spaces), np.uint64)
        self._dims = np.zeros(len(plan.dims), np.int64)
        self.space_index = {(s.kind, s.name): i for i, s in enumerate(plan.spaces)}
        arrays = (self._steps, self._specs, self._resolved, self._kernels, self._bases, self._dims, library.scratch)
        steps_, specs_, *rest = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
        arguments = (
            steps_, ctypes.c_int64(len(self._steps)), specs_, ctypes.c_int64(len(self._specs)), *rest,
            ctypes.c_int64(library.scratch_bytes),
        )  # fmt: skip
        self._timed = functools.partial(library.run, ctypes.c_void_p(library.pool), *arguments)
        self.call: Callable[[], None] = functools.partial(self._timed, ctypes.c_void_p(None))
        """One run at the addresses and dims that are set: converts no argument and makes no array."""
        alone = ctypes.c_void_p(library.alone)
        self.call_alone: Callable[[], None] = functools.partial(library.run_short, alone, *arguments, ctypes.c_void_p(None))
        """The same by the calling thread alone, for runs that are over before others would have woken up."""

    def bind(self, kind: str, name: str, address: int) -> None:
        """Sets the base address of a space; unknown names are refused with KeyError."""
        self._bases[self.space_index[kind, name]] = address

    def run(self, dims: Mapping[str, int]) -> None:
        """Runs the plan at these dims, on memory bound before."""
        self.set_dims([dims[d.name] for d in self.plan.dims])
        self.call()

    def set_dims(self, values: Sequence[int]) -> None:
        """The dims of later calls, in the plan's order."""
        for n, value in enumerate(values):  # no array is made for them
            self._dims[n] = value

    def set_base(self, space: int, address: int) -> None:
        """Sets the base address of the space of that number."""
        self._bases[space] = address

    def kernel_times(self, repeat: int = 20) -> list[tuple[str, float]]:
        """(kernel, milliseconds) of each call in order, at the dims of the last run. A barrier's wait stands apart
        under the name "barrier"."""
        nanoseconds = np.zeros(len(self._steps), np.int64)
        for _ in range(repeat):
            self._timed(ctypes.c_void_p(nanoseconds.ctypes.data))
        names = [k.symbol for k in self.plan.kernels]
        return [
            (names[s["target"]] if s["op"] == _CALL else "barrier", int(t) / repeat / 1e6)
            for s, t in zip(self._steps, nanoseconds, strict=True)
        ]


def _flatten(body: tuple[Call | If, ...], steps: list, specs: list) -> None:
    """Steps and argument specs of a body, branches as jumps; jumps are patched once their target is known."""
    for step in body:
        if isinstance(step, Call):
            if step.barrier and steps:
                steps.append((_BARRIER, 0, 0, 0))
            steps.append((_CALL, step.kernel, len(specs), len(step.args)))
            specs += [_spec(a) for a in step.args]
            continue
        steps.append((_BARRIER, 0, 0, 0))
        jump = len(steps)
        specs.append(_spec(step.condition))
        steps.append((_JUMP_IF_FALSE, 0, len(specs) - 1, 1))
        _flatten(step.then, steps, specs)
        end = len(steps)
        steps.append((_JUMP, 0, 0, 0))
        steps[jump] = (_JUMP_IF_FALSE, len(steps), *steps[jump][2:])
        _flatten(step.orelse, steps, specs)
        steps[end] = (_JUMP, len(steps), 0, 0)


def _spec(arg: Address | DimValue | Constant) -> tuple[int, int, int]:
    if isinstance(arg, Address):
        return 0, arg.space, arg.offset
    return (1, arg.dim, 0) if isinstance(arg, DimValue) else (2, 0, arg.value)
