"""How the kernels of a program are launched: grids, and where the things that a launch names lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from aotc.codegen.cuda.build import Cubin
from aotc.codegen.cuda.chain import phase_kind
from aotc.codegen.cuda.frame import Grid, Setting, Source, TensorMap, waits
from aotc.codegen.cuda.render import render
from aotc.codegen.cuda.tables import Schedules
from aotc.ir.program import ALIGNMENT, LINEAR_SPACES, Call, Kernel, Program, Strides, area_of
from aotc.ir.sizes import Dim, Size, product, upper_bound


@dataclass(frozen=True)
class Launch:
    """A kernel ready to be launched: `symbol` of a cubin, the grid, threads (32 a warp), dynamic shared memory.

    Parameters, all pointers: those of `arguments(program, call)`, then the dims (i32, in `dim_order`), then counters
    and scratch where their bytes are not 0, then Triton's global and profile scratch (null where the cubin's sizes
    are 0); then, by value, tensor maps. Calls share counters and scratch: they must not overlap. Counters are 0 before
    and after a call.
    """

    symbol: str
    grid: Grid
    num_warps: int
    shared: int
    scratch_bytes: Size = 0
    counter_bytes: Size = 0
    maps: tuple[TensorMap, ...] = ()
    together: bool = False

    def grid_at(self, bounds: tuple[Dim, ...]) -> tuple[int, int, int]:
        """The grid at the upper bounds of a program's dims: surplus blocks leave early."""
        x, y, z = (upper_bound(n, bounds) for n in self.grid)
        return x, y, z


@dataclass(frozen=True)
class SlotLayout:
    """Bytes: the offset of each linear input by key, in a slot of the state or a block of the cache, and their strides
    by area."""

    offsets: Mapping[str, int]
    strides: Strides


def dim_order(programs: Iterable[Program]) -> tuple[str, ...]:
    """The dims of all programs of an artifact, as the device holds their values."""
    return tuple(sorted({d.name for p in programs for d in p.dims}))


def widest_dims(program: Program, programs: Iterable[Program]) -> tuple[Dim, ...]:
    """The dims of a program with the largest bounds that programs of its kind, which have the same dims, give them."""
    names = [d.name for d in program.dims]
    kind = [p for p in programs if [d.name for d in p.dims] == names]
    return tuple(replace(d, hi=max(p.dims[n].hi for p in kind)) for n, d in enumerate(program.dims))


def slot_layout(program: Program) -> SlotLayout:
    """Those of an area one after the other, in the order of the inputs, each without its first axis."""
    offsets: dict[str, int] = {}
    strides: dict[str, int] = {}
    for b in (program.buffers[n] for n in program.inputs):
        if b.space in LINEAR_SPACES:
            area = area_of(b.type)
            offsets[b.key] = strides.get(area, 0)
            size = upper_bound(product(b.type.shape[1:]), program.dims) * b.type.dtype.itemsize
            strides[area] = offsets[b.key] + -(-size // ALIGNMENT) * ALIGNMENT
    return SlotLayout(offsets, strides)


def phases_of(program: Program, arch: str, widest: tuple[Dim, ...] = ()) -> Callable[[Kernel], Hashable]:
    """What kernels of a program that can be phases of one have in common: for `aotc.passes.merge_phases`."""
    setting = Setting(arch, program.dims, (), widest=widest)
    return lambda kernel: phase_kind(kernel, setting)


def render_program(
    program: Program, arch: str, dims: tuple[str, ...], strides: Strides, schedules: Schedules | None = None,
    widest: tuple[Dim, ...] = (),
) -> dict[str, Source]:  # fmt: skip
    """The source of each kernel of a program, by the kernel's name. `widest`: see `Setting`."""
    setting = Setting(arch, program.dims, dims, strides, schedules, widest)
    return {name: render(kernel, setting) for name, kernel in sorted(program.kernels.items())}


def kernel_meta(cubin: Cubin, launch: Launch, bounds: tuple[Dim, ...], arch: str) -> dict[str, Any]:
    """What a plan says of a kernel besides its cubin's path. `waits`: it starts before the kernel before it has ended, and
    waits for it itself. `together`: its blocks wait for one another, so that no more may be launched than run at once."""
    facts = {k: v for k, v in asdict(cubin).items() if k not in ("data", "name")}
    found = [asdict(m) for m in launch.maps]
    more = ({"maps": found} if found else {}) | ({"together": True} if launch.together else {})
    return {"grid": list(launch.grid_at(bounds)), **facts, "waits": waits(arch), **more}


def launches(sources: Mapping[str, Source], cubins: Mapping[str, Cubin]) -> dict[str, Launch]:
    """The launch of each kernel of a program, by the kernel's name."""
    return {
        name: Launch(
            s.symbol, s.grid, cubins[s.symbol].num_warps, cubins[s.symbol].shared, s.scratch_bytes, s.counter_bytes, s.maps,
            s.together,
        )
        for name, s in sources.items()
    }


def arguments(program: Program, call: Call) -> tuple[str, ...]:
    """The buffers that a call passes: inputs, then outputs that do not update one of them."""
    fresh = (b for b in call.outputs if b not in call.inputs or program.buffers[b].space not in LINEAR_SPACES)
    return (*call.inputs, *fresh)
