"""Times kernels on the GPU that is here, through the runtime's own device: a graph of one kernel many times over.

Weights and caches are read from copies in turn, so that no copy is still in the L2 cache when its turn comes again:
that is how a model's kernels meet theirs. Activations have one place, as in a model.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import cast

import numpy as np

from aotc.artifact.plan import Address, Arg, Constant, Kernel, Plan, Space
from aotc.artifact.plan import Call as PlanCall
from aotc.artifact.reader import Artifact
from aotc.codegen.cuda.launch import arguments, kernel_meta, launches
from aotc.errors import DeviceError, DeviceLostError, RequestError
from aotc.ir.dtypes import DType
from aotc.ir.graph import TensorType
from aotc.ir.program import LINEAR_SPACES, Buffer, Program, area_of, buffer_bytes
from aotc.ir.sizes import evaluate, upper_bound
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.cuda_program import CudaKernels, CudaProgram
from aotc.runtime.devices.driver import CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, CU_EVENT_DEFAULT
from aotc.tuner import Job, Timing, Trial

CONTEXT = 2048  # tokens of a sequence when attention to a cache is measured, or as many as there can be
LEAST_L2 = 50 << 20  # bytes, an H100's; a card with more says so
LAUNCHES, LEAST_CALLS, MOST_CALLS = 7, 20, 1024
_STAGING = 16 << 20  # bytes of the host that copies go through
_PATTERN = 1048583  # random elements before they repeat: a prime, so that no two rows of a matrix are the same


class Meter:
    """Times trials for `arch`, on the card that is named `device`. Trials of one job follow each other: they share
    its memory."""

    def __init__(self, arch: str, gpu: CudaDevice) -> None:
        self.arch, self.device, self._gpu = arch, gpu.name, gpu
        self._bench: _Bench | None = None

    def __call__(self, job: Job, trial: Trial) -> Timing:
        """Raises DeviceError where the trial does not start, DeviceLostError where the GPU is lost with it."""
        try:
            if self._bench is None or self._bench.job is not job:
                if self._bench is not None:
                    self._bench.device.close()
                # A device for each job gives back all that the job took; the context is kept by the other one.
                self._bench = None
                self._bench = _Bench(CudaDevice(), self.arch, job)
            return self._bench.run(trial)
        except DeviceError as error:
            try:
                self._gpu.synchronize()
            except DeviceError:
                text = f"the GPU is lost after a candidate of {job.key} ({trial.source.symbol}): {error}; run it again"
                raise DeviceLostError(text) from None
            raise


def open_meter(arch: str | None) -> Meter:
    """The meter of the GPU that is here; `arch`, where given, must be its own. Raises DeviceError, RequestError."""
    gpu = CudaDevice()
    here = "sm{}{}".format(*gpu.capability)
    if arch not in (None, here):
        raise RequestError(
            f"schedules of {arch} are measured on such a card, this is {here} ({gpu.name}): --arch native"
        )
    return Meter(here, gpu)


def copies_of(rotated_bytes: int, l2_bytes: int, room: int) -> int:
    """Copies of weights and caches: three times the L2 cache together, within the memory that there is.

    Raises DeviceError where not even one fits.
    """
    if rotated_bytes > room:
        raise DeviceError(f"{rotated_bytes / 1e9:.1f} GB of weights and caches are more than half of the free memory")
    wanted = -(-3 * max(l2_bytes, LEAST_L2) // max(rotated_bytes, 1))
    return max(min(wanted, MOST_CALLS, room // max(rotated_bytes, 1)), 1) if rotated_bytes else 1


class _Bench:
    """One job: its memory, and graphs of its trials."""

    def __init__(self, device: CudaDevice, arch: str, job: Job) -> None:
        self.device, self.arch, self.job = device, arch, job
        program, self.staging = job.program, device.pinned(_STAGING)
        self.values = step_dims(program)
        self.buffers = [program.buffers[n] for n in arguments(program, job.call)]
        self.inputs = set(job.call.inputs)
        rotated = [b for b in self.buffers if b.space in ("weight", *LINEAR_SPACES)]
        l2 = device.call("cuDeviceGetAttribute", CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device.device)
        free, _ = device.call("cuMemGetInfo")
        copies = copies_of(sum(map(self._nbytes, rotated)), l2, free // 2)
        self.calls = max(copies, LEAST_CALLS)
        self.places = {b.name: self._filled(b, copies if b in rotated else 1) for b in self.buffers}
        (self.dims,) = self._uploaded(np.array([self.values.get(d, 0) for d in job.dims], np.int32), 1)

    def run(self, trial: Trial) -> Timing:
        """Checks nothing: the outputs of one call, and the time of one among many."""
        device, source, bounds = self.device, trial.source, self.job.program.dims
        grid = [upper_bound(n, bounds) for n in source.grid]
        own = [device.allocate(upper_bound(n, bounds)) for n in (source.counter_bytes, source.scratch_bytes)]
        triton = device.allocate(trial.cubin.global_scratch_bytes * math.prod(grid))
        tail: list[Arg] = [Address(0, a) for a in (self.dims, *own) if a]
        tail += [Address(0, triton) if triton else Constant(0), Constant(0)]
        calls = []
        for n in range(self.calls):
            places = [self.places[b.name] for b in self.buffers]
            calls.append(PlanCall(0, (*(Address(0, at[n % len(at)]) for at in places), *tail)))
        outputs = self._outputs(self._program(trial, calls[:1]))
        return Timing(self._time(self._program(trial, calls)) / len(calls), outputs)

    def _program(self, trial: Trial, calls: list[PlanCall]) -> CudaProgram:
        (launch,) = launches({"": trial.source}, {trial.source.symbol: trial.cubin}).values()
        meta = {"cubin": "", **kernel_meta(trial.cubin, launch, self.job.program.dims, self.arch)}
        kernel = Kernel(trial.source.symbol, self.job.choice.family.name, meta)
        plan = Plan(self.job.key, (), (Space("arena", "arena"),), (), (), (kernel,), tuple(calls), 0, 0)
        kernels = CudaKernels(self.device, cast(Artifact, _OneCubin(trial.cubin.data)))
        return CudaProgram(plan, self.device, kernels, {"arena": 0}, lambda offset: offset)

    def _outputs(self, program: CudaProgram) -> list[np.ndarray]:
        """What one call writes into memory that was poisoned: not a number, in every float type."""
        device, fresh = self.device, [b for b in self.buffers if b.name not in self.inputs]
        for b in fresh:
            device.call("cuMemsetD8Async", self.places[b.name][0], 0xFF, self._nbytes(b), device.stream)
        program.launch()
        shapes = [tuple(int(evaluate(s, self.values)) for s in b.type.shape) for b in fresh]  # type: ignore[arg-type]
        arrays = [np.empty(shape, b.type.dtype.np) for shape, b in zip(shapes, fresh, strict=True)]
        for b, array in zip(fresh, arrays, strict=True):
            flat = array.reshape(-1).view(np.uint8)
            for begin in range(0, flat.nbytes, _STAGING):
                part = self.staging[: min(_STAGING, flat.nbytes - begin)]
                device.download(part, self.places[b.name][0] + begin)
                device.synchronize()
                flat[begin : begin + part.nbytes] = part
        return arrays

    def _time(self, program: CudaProgram) -> float:
        """Microseconds of the graph: the median of several launches."""
        device = self.device
        begin, end = (device.hold("cuEventDestroy", device.call("cuEventCreate", CU_EVENT_DEFAULT)) for _ in range(2))
        times = []
        for n in range(LAUNCHES + 1):
            device.call("cuEventRecord", begin, device.stream)
            program.launch()
            device.call("cuEventRecord", end, device.stream)
            device.synchronize()
            if n:  # the first one warms up
                times.append(device.call("cuEventElapsedTime", begin, end) * 1e3)
        return statistics.median(times)

    def _filled(self, b: Buffer, copies: int) -> list[int]:
        """Copies of a buffer that a call reads; memory for one that it writes."""
        if b.name not in self.inputs:
            return [self.device.allocate(self._nbytes(b))]
        made = step_inputs(self.job.program, self.values).get(b.key) if b.space == "input" else None
        if made is None:
            made = noise(b.type.dtype, self._nbytes(b) // b.type.dtype.itemsize)
        return self._uploaded(made, copies)

    def _uploaded(self, data: np.ndarray, copies: int) -> list[int]:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        addresses = [self.device.allocate(flat.nbytes, zero=False) for _ in range(copies)]
        for begin in range(0, flat.nbytes, _STAGING):
            part = flat[begin : begin + _STAGING]
            self.staging[: part.nbytes] = part
            for address in addresses:
                self.device.upload(address + begin, self.staging[: part.nbytes])
            self.device.synchronize()
        return addresses

    def _nbytes(self, b: Buffer) -> int:
        if b.space in LINEAR_SPACES:
            area = area_of(b.type)
            return self.values["pages" if area == "paged" else "slots"] * self.job.strides[area]
        return buffer_bytes(b, self.job.program.dims)


@dataclass(frozen=True)
class _OneCubin:
    """Stands where `CudaKernels` wants an artifact."""

    data: bytes

    def read(self, _: str) -> bytes:
        return self.data


def step_dims(program: Program) -> dict[str, int]:
    """The dims of a full step: every row of a decode program, one prompt for an extend program."""
    values = {d.name: d.hi for d in program.dims}
    if "tokens" in values:
        values["rows"] = 1
    rows = values.get("rows", 1)
    return values | {"slots": rows, "pages": rows * _pages_of_a_row(program)}


def _caches(program: Program) -> list[TensorType]:
    return [b.type for b in program.buffers.values() if b.space in LINEAR_SPACES and b.type.rank == 5]


def _pages_of_a_row(program: Program) -> int:
    """Pages that hold what a sequence of a step has; 1 where there are none."""
    sizes = [upper_bound(t.shape[3], program.dims) for t in _caches(program) if area_of(t) == "paged"]
    longest = max(CONTEXT, *(d.hi for d in program.dims if d.name == "tokens"), 0)
    return max((-(-longest // size) for size in sizes), default=1)


def step_inputs(program: Program, values: dict[str, int]) -> dict[str, np.ndarray]:
    """The integers of that step by the program's inputs: tokens at the end of sequences, each in its slot."""
    rows, tokens = values["slots"], values.get("tokens", values["slots"])
    each = tokens // rows
    contexts = [upper_bound(t.shape[3], program.dims) for t in _caches(program) if area_of(t) == "static"]
    length = max(min([CONTEXT, *contexts]), each)
    made: dict[str, np.ndarray] = {
        "positions": np.tile(np.arange(length - each, length), rows), "rows": np.repeat(np.arange(rows), each),
        "query_start": np.arange(rows + 1) * each, "seq_lens": np.full(rows, length), "kv_index": np.arange(rows),
    }  # fmt: skip
    for table in (b for b in program.buffers.values() if b.key == "block_table"):
        own = _pages_of_a_row(program)
        most = upper_bound(table.type.shape[1], program.dims)
        made["block_table"] = np.arange(rows)[:, None] * own + np.minimum(np.arange(most), own - 1)[None, :]
    return {k: v.astype(np.int32) for k, v in made.items()}


def noise(dtype: DType, count: int) -> np.ndarray:
    """Normal floats; zeros of other types."""
    if not dtype.is_float:
        return np.zeros(count, dtype.np)
    return np.resize(np.random.default_rng(0).standard_normal(min(count, _PATTERN)).astype(dtype.np), count)
