"""What differs between devices when an artifact is written: which linear layers have a template, kernels, plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from aotc.artifact.manifest import PAGE, ProgramEntry, TargetEntry, Weight
from aotc.artifact.plan import Address, Plan, encode_plan
from aotc.artifact.writer import ArtifactWriter
from aotc.ir.program import Program, Strides, area_of
from aotc.ir.sizes import upper_bound
from aotc.ir.templates import Templates
from aotc.passes import merge_phases
from aotc.passes.fuse import PACKED
from aotc.passes.runner import dump
from aotc.planner import CudaKernels, Placement, cuda_arena_bytes, make_cuda_plan, make_plan
from aotc.target import Target

if TYPE_CHECKING:
    from aotc.codegen.cuda.build import Cubin
    from aotc.codegen.cuda.frame import Source
    from aotc.codegen.cuda.tables import Schedules, Table

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Work:
    """The programs of one device, and where things go."""

    programs: list[Program]
    strides: Strides
    placement: Placement
    writer: ArtifactWriter
    progress: Progress
    tables: tuple[Table, ...] = ()
    batch_invariant: bool = False
    persistent_kernel: bool = False  # linear layers that follow one another are phases of one kernel where that is possible
    note: Callable[[str], None] = lambda _: None  # takes a line that the user should read


class Backend(Protocol):
    """One device."""

    device: str

    @property
    def templates(self) -> Templates:
        """What its templates compute."""
        ...

    def batch_sizes(self, most: int) -> tuple[int, ...]:
        """Rows for which a tensor model of up to `most` has a program of its own, besides the one for `most`."""
        ...

    def arena_bytes(self, target: Target, work: Work) -> dict[str, int]:
        """What each program takes within a step, by name; weights have no place yet."""
        ...

    def write(self, target: Target, work: Work) -> TargetEntry:
        """Writes kernels and plans of one target of this device."""
        ...


class CpuBackend:
    """C++ kernels in one library a level."""

    device = "cpu"

    templates = PACKED

    def batch_sizes(self, most: int) -> tuple[int, ...]:
        return ()  # kernels count rows as they run: programs for fewer would be the same ones

    def arena_bytes(self, target: Target, work: Work) -> dict[str, int]:
        return {p.name: p.arena_bytes for p in work.programs}

    def write(self, target: Target, work: Work) -> TargetEntry:
        from aotc.codegen.cpu.library import build

        total = len({k for p in work.programs for k in p.kernels}) + 1
        step = _counted(work.progress, f"kernels {target.name}", total)
        library = build(work.programs, target.name, work.strides, step)
        path = f"kernels/{target.name}/kernels.so"
        work.writer.add_file(path, library.data)
        for name, source in library.sources.items():
            dump(f"{target.name}_{name}.cpp", source)
        plans = [make_plan(p, library.dims, work.placement) for p in work.programs]
        return _entry(target, plans, path, library.scratch_bytes, work)


class CudaBackend:
    """Kernels in Triton and CUDA C++ as cubins, each once."""

    device = "cuda"

    def __init__(self) -> None:
        self._built: dict[str, _Built] = {}  # by target: asked for the arena first, then written

    @property
    def templates(self) -> Templates:
        from aotc.codegen.cuda.render import TEMPLATES

        return TEMPLATES

    def batch_sizes(self, most: int) -> tuple[int, ...]:
        """Powers of four: a grid, and the schedules, are those of the program's bound, at most four times too large."""
        return tuple(4**n for n in range(most.bit_length() // 2 + 1) if 4**n < most)

    def arena_bytes(self, target: Target, work: Work) -> dict[str, int]:
        built = self._build(target, work)
        return {made.program.name: cuda_arena_bytes(made.program, made.kernels) for made in built.programs}

    def write(self, target: Target, work: Work) -> TargetEntry:
        from aotc.codegen.cuda.tables import encode_table

        built = self._build(target, work)
        if built.schedules.untuned():
            work.note(built.schedules.untuned())
        work.writer.add_file(f"schedules/{target.name}.json", encode_table(built.schedules.used()))
        for symbol, cubin in built.cubins.items():
            work.writer.add_file(f"kernels/{target.name}/{symbol}.cubin", cubin.data)
            source = built.sources[symbol]
            dump(f"{target.name}_{symbol}.{'cu' if source.language == 'cuda' else 'py'}", source.text)
        plans = [make_cuda_plan(made.program, made.kernels, work.placement) for made in built.programs]
        counters = max((c for made in built.programs for c in made.kernels.counters.values()), default=0)
        return msgspec.structs.replace(_entry(target, plans, "", 0, work), dims=built.dims, counter_bytes=counters)

    def _build(self, target: Target, work: Work) -> _Built:
        if target.name not in self._built:
            self._built[target.name] = _build(target, work)
        return self._built[target.name]


@dataclass(frozen=True)
class _BuiltProgram:
    program: Program
    kernels: CudaKernels


@dataclass(frozen=True)
class _Built:
    """The kernels of a CUDA target, and what each program's plan must know of them."""

    sources: dict[str, Source]
    cubins: dict[str, Cubin]
    schedules: Schedules
    dims: tuple[str, ...]
    programs: list[_BuiltProgram]


def _build(target: Target, work: Work) -> _Built:
    from aotc.codegen.cuda.build import compile_sources
    from aotc.codegen.cuda.launch import dim_order, kernel_meta, launches, phases_of, render_program, widest_dims
    from aotc.codegen.cuda.tables import Schedules

    dims, schedules = dim_order(work.programs), Schedules(target.name, work.tables)
    planned, rendered = [], []
    for program in work.programs:
        widest = widest_dims(program, work.programs) if work.batch_invariant else ()
        if work.persistent_kernel:
            program = merge_phases(program, phases_of(program, target.name, widest))
        planned.append(program)
        rendered.append(render_program(program, target.name, dims, work.strides, schedules, widest))
    sources = {s.symbol: s for program in rendered for s in program.values()}
    step = _counted(work.progress, f"kernels {target.name}", len(sources))
    cubins = compile_sources(sources.values(), target.name, step)
    programs = []
    for program, of_program in zip(planned, rendered, strict=True):
        kernels = CudaKernels({}, {}, {}, {}, dims)
        for name, launch in launches(of_program, cubins).items():
            meta = kernel_meta(cubins[launch.symbol], launch, program.dims, target.name)
            kernels.meta[name] = {"cubin": f"kernels/{target.name}/{launch.symbol}.cubin", **meta}
            kernels.scratch[name] = upper_bound(launch.scratch_bytes, program.dims)
            kernels.counters[name] = upper_bound(launch.counter_bytes, program.dims)
            kernels.triton[name] = cubins[launch.symbol].global_scratch_bytes * math.prod(meta["grid"])
        programs.append(_BuiltProgram(program, kernels))
    return _Built(sources, cubins, schedules, dims, programs)


BACKENDS: dict[str, Callable[[], Backend]] = {"cpu": CpuBackend, "cuda": CudaBackend}


def _counted(progress: Progress, stage: str, total: int) -> Callable[[str], None]:
    done = iter(range(1, total + 1))
    progress(stage, 0, total)
    return lambda _: progress(stage, next(done), total)


def _entry(target: Target, plans: list[Plan], library: str, scratch_bytes: int, work: Work) -> TargetEntry:
    entries = []
    for plan, program in zip(plans, work.programs, strict=True):
        name = f"plans/{target.name}/{plan.program}.json"
        work.writer.add_file(name, encode_plan(plan))
        layout = next((area_of(b.type) for b in program.buffers.values() if b.space == "kv"), "")
        if layout:
            kind, bucket = plan.program.split("_")[-2:]
        else:  # of several programs of a tensor model, each has one dim, which counts rows
            kind, bucket = "call", plan.dims[0].hi if len(plans) > 1 else 0
        entries.append(ProgramEntry(plan.program, kind, int(bucket), name, layout))
    arena = max(p.arena_bytes for p in plans)
    used = weight_ranges(plans, work.writer.weights)
    return TargetEntry(target.name, target.device, library, arena, scratch_bytes, tuple(entries), weights=used)


def weight_ranges(plans: list[Plan], weights: list[Weight]) -> tuple[tuple[int, int], ...]:
    """The pages of weights.bin that plans name, as (offset, bytes), adjoining ones joined."""
    ends: dict[int, int] = {}
    for w in weights:
        ends[w.offset] = max(w.offset + w.nbytes, ends.get(w.offset, 0))
    offsets = set()
    for plan in plans:
        named = [a for call in plan.calls() for a in call.args if isinstance(a, Address)]
        named += [Address(t.space, t.offset) for t in (*plan.inputs, *plan.outputs)] + list(plan.conditions())
        offsets |= {a.offset for a in named if plan.spaces[a.space].kind == "weights"}
    ranges: list[list[int]] = []
    for offset in sorted(offsets):
        begin, end = offset // PAGE * PAGE, -(-ends[offset] // PAGE) * PAGE
        if begin == end:  # a weight without elements
            continue
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(end, ranges[-1][1])
        else:
            ranges.append([begin, end])
    return tuple((begin, end - begin) for begin, end in ranges)
