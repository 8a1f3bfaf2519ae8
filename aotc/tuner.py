"""Measures candidates of schedules on a device, one shape class after the other, and keeps the fastest of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from time import monotonic as clock
from typing import Any

import msgspec
import numpy as np

from aotc.backends import Progress
from aotc.codegen.cuda.build import Cubin, compile_sources
from aotc.codegen.cuda.frame import Setting, Source
from aotc.codegen.cuda.launch import dim_order, widest_dims
from aotc.codegen.cuda.render import render
from aotc.codegen.cuda.tables import Choice, Entry, Forced, Schedules, Table
from aotc.errors import AotcError, CompilerError, DeviceLostError, RequestError
from aotc.harness import TOLERANCE, relative_error
from aotc.ir.program import ALIGNMENT, LINEAR_SPACES, Call, Program, Strides, area_of
from aotc.ir.sizes import Dim, product, upper_bound


@dataclass(frozen=True)
class Job:
    """A shape class to be measured, by the first call of the programs that has it. `strides` are what one sequence
    or page takes in the caches that this call reads: no other layer's lie between them."""

    key: str
    choice: Choice
    program: Program
    call: Call
    dims: tuple[str, ...]
    strides: Strides
    widest: tuple[Dim, ...] = ()

    def source(self, arch: str, schedule: Any) -> Source:
        """The kernel with a schedule. Raises AotcError."""
        forced = Forced(arch, {self.key: schedule})
        setting = Setting(arch, self.program.dims, self.dims, self.strides, forced, self.widest)
        return render(self.program.kernels[self.call.kernel], setting)


@dataclass(frozen=True)
class Trial:
    """A compiled candidate."""

    source: Source
    cubin: Cubin


@dataclass(frozen=True)
class Timing:
    """What a candidate took, and its outputs (logical, in the order of the kernel's fresh outputs)."""

    microseconds: float
    outputs: list[np.ndarray]


Meter = Callable[[Job, Trial], Timing]
"""Times a candidate. Raises DeviceError where it does not run, DeviceLostError where nothing runs any more."""


def jobs_of(programs: Iterable[Program], arch: str, batch_invariant: bool = False) -> list[Job]:
    """The shape classes of programs, in order, each once."""
    programs = list(programs)
    dims, found = dim_order(programs), dict[str, Job]()
    for program in programs:
        widest = widest_dims(program, programs) if batch_invariant else ()
        for call in program.calls():
            schedules, strides = Schedules(arch), _strides(program, call)
            render(program.kernels[call.kernel], Setting(arch, program.dims, dims, strides, schedules, widest))
            for key, choice in schedules.chosen.items():
                found.setdefault(key, Job(key, choice, program, call, dims, strides, widest))
    return list(found.values())


def _strides(program: Program, call: Call) -> Strides:
    found: dict[str, int] = {}
    for b in {n: program.buffers[n] for n in call.inputs}.values():
        if b.space in LINEAR_SPACES:
            size = upper_bound(product(b.type.shape[1:]), program.dims) * b.type.dtype.itemsize
            found[area_of(b.type)] = found.get(area_of(b.type), 0) + -(-size // ALIGNMENT) * ALIGNMENT
    return found


@dataclass(frozen=True)
class Tuning:
    """How to tune: the meter; where the table goes after each shape class; a line for the user; seconds to spend."""

    meter: Meter
    save: Callable[[Table], None]
    note: Callable[[str], None]
    progress: Progress
    budget: float = float("inf")


def tune(jobs: list[Job], table: Table, tuning: Tuning) -> tuple[Table, int]:
    """(the table with the jobs' schedules, jobs that the budget left out)."""
    end = clock() + tuning.budget
    stage = f"measure {table.arch}"
    tuning.progress(stage, 0, len(jobs))
    for n, job in enumerate(jobs):
        if clock() >= end:
            return table, len(jobs) - n
        entry = best(job, table.arch, tuning)
        if entry is not None:
            table = msgspec.structs.replace(table, schedules={**table.schedules, job.key: entry})
            tuning.save(table)
        tuning.progress(stage, n + 1, len(jobs))
    return table, 0


def best(job: Job, arch: str, tuning: Tuning) -> Entry | None:
    """The fastest candidate of those that give what the first one gives; None where none runs."""
    compiled = _compiled(job, arch, tuning.note)
    reference: list[np.ndarray] | None = None
    times: dict[Any, float] = {}
    for schedule, trial in compiled.items():
        try:
            timing = tuning.meter(job, trial)
        except DeviceLostError:
            raise
        except AotcError as error:
            tuning.note(_skipped(job, schedule, str(error)))
            continue
        reason = _difference(timing.outputs, reference or timing.outputs)
        if reason:
            tuning.note(_skipped(job, schedule, reason))
            continue
        reference = reference or timing.outputs
        times[schedule] = timing.microseconds
    if not times:
        tuning.note(f"no candidate of {job.key} runs: the rule stays")
        return None
    fastest = min(times, key=lambda s: times[s])  # the first of equal ones, the rule before all
    by_rule = times.get(job.choice.family.rule(arch, job.choice.shape))
    return Entry(asdict(fastest), round(times[fastest], 3), None if by_rule is None else round(by_rule, 3))


def _compiled(job: Job, arch: str, note: Callable[[str], None]) -> dict[Any, Trial]:
    """The candidates that compile, by schedule, in order."""
    sources: dict[Any, Source] = {}
    for schedule in job.choice.family.tries(arch, job.choice.shape):
        try:
            sources[schedule] = job.source(arch, schedule)
        except AotcError as error:
            note(_skipped(job, schedule, str(error)))
    try:
        cubins = compile_sources(sources.values(), arch)
    except CompilerError:  # of one of them: which, and what of the others?
        cubins = {}
        for schedule, source in sources.items():
            try:
                cubins |= compile_sources([source], arch)
            except CompilerError as error:
                note(_skipped(job, schedule, str(error)))
    return {s: Trial(source, cubins[source.symbol]) for s, source in sources.items() if source.symbol in cubins}


def _difference(got: list[np.ndarray], expected: list[np.ndarray]) -> str:
    for a, b in zip(got, expected, strict=True):
        name = "bf16" if a.dtype.name == "bfloat16" else f"f{8 * a.dtype.itemsize}"
        if a.dtype.kind not in "iub" and not np.isfinite(a.astype(np.float32)).all():
            return "its output is not finite"
        error = relative_error(a, b)
        if error > (0 if a.dtype.kind in "iub" else TOLERANCE[name]):
            return f"its output differs from the first candidate's by {error:.2g}"
    return ""


def _skipped(job: Job, schedule: Any, reason: str) -> str:
    fields = ", ".join(f"{k} {v}" for k, v in asdict(schedule).items())
    return f"skipped {job.key} ({fields}): {' '.join(reason.split())}"


def select(programs: list[Program], kinds: str | None) -> list[Program]:
    """The programs of `--programs`. Raises RequestError for a kind that there is none of."""
    if kinds is None:
        return programs
    there = dict.fromkeys(_kind(p) for p in programs)
    asked = [k.strip() for k in kinds.split(",")]
    for kind in asked:
        if kind not in there:
            raise RequestError(f"--programs {kind}: this model has {', '.join(there)}")
    return [p for p in programs if _kind(p) in asked]


def _kind(program: Program) -> str:
    """decode or extend, of both layouts of the cache; a tensor model's program by its name."""
    return program.name.removeprefix("paged_").partition("_")[0]


def left(jobs: list[Job], table: Table, force: bool) -> list[Job]:
    """The jobs that the table lacks, or all."""
    return [j for j in jobs if force or j.key not in table.schedules]


def on_device(table: Table, device: str) -> Table:
    """The table, with the name of the card that measures it. Raises RequestError where another one did."""
    if table.schedules and table.device and table.device != device:
        raise RequestError(f"the table was measured on {table.device}, this is {device}: write another one with -o")
    return msgspec.structs.replace(table, device=device)
