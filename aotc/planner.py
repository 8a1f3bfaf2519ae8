"""Prints a program as the plan that an artifact holds: buffers become places, names become numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from aotc.artifact import plan as P
from aotc.errors import UnsupportedError
from aotc.ir.cost import flops
from aotc.ir.program import LINEAR_SPACES, Branch, Buffer, Call, Instruction, Program, area_of
from aotc.ir.sizes import Size


@dataclass(frozen=True)
class Placement:
    """Where things outside the arena lie: weight offsets by key; by area (`area_of`) and name, offsets within a slot of
    the state or a block of the cache."""

    weights: Mapping[str, int]
    states: Mapping[str, Mapping[str, int]]


def make_plan(program: Program, dims_of: Mapping[str, tuple[str, ...]], placement: Placement) -> P.Plan:
    """The plan. `dims_of` names the dims that each kernel takes after its buffers.

    Inputs and outputs get a space each; all weights share one, so do all states, and so do the layers of the cache.
    """
    return _Planner(program, dims_of, placement).plan()


@dataclass(frozen=True)
class CudaKernels:
    """By kernel name: facts of its launch, bytes of scratch, of counters, of Triton's own scratch. `dims` orders the
    dims on the device."""

    meta: dict[str, dict[str, Any]]
    scratch: dict[str, int]
    counters: dict[str, int]
    triton: dict[str, int]
    dims: tuple[str, ...]


def make_cuda_plan(program: Program, kernels: CudaKernels, placement: Placement) -> P.Plan:
    """The plan of a program for CUDA: kernels take the dims from device memory, and scratch from the arena's end."""
    return _CudaPlanner(program, kernels, placement).plan()


def cuda_arena_bytes(program: Program, kernels: CudaKernels) -> int:
    """The arena of that plan, before weights have places."""
    return _CudaPlanner(program, kernels, Placement({}, {})).arena_bytes


class _Planner:
    def __init__(self, program: Program, dims_of: Mapping[str, tuple[str, ...]], placement: Placement) -> None:
        self.program, self.dims_of, self.placement = program, dims_of, placement
        self.spaces: list[P.Space] = [
            P.Space("arena", "arena"),
            P.Space("weights", "weights"),
            P.Space("state", "state"),
            P.Space("kv", "kv"),
        ]
        self.space_of: dict[str, int] = {}
        for b in program.buffers.values():
            if b.space in ("input", "output"):
                self.space_of[b.name] = len(self.spaces)
                self.spaces.append(P.Space(b.key, b.space))
        self.kernels = sorted(program.kernels)
        self.dims = [d.name for d in program.dims]

    def plan(self) -> P.Plan:
        program = self.program
        updated = {}
        for name, buffer in program.outputs:
            if program.buffers[buffer].space in LINEAR_SPACES:
                updated[name] = program.buffers[buffer].key
        return P.Plan(
            program=program.name,
            dims=tuple(P.Dim(d.name, d.lo, d.hi) for d in program.dims),
            spaces=tuple(self.spaces),
            inputs=tuple(self._tensor(program.buffers[b].key, program.buffers[b]) for b in program.inputs),
            outputs=tuple(self._tensor(n, program.buffers[b], updated.get(n)) for n, b in program.outputs),
            kernels=tuple(self._kernel(k) for k in self.kernels),
            body=self._body(program.body),
            arena_bytes=program.arena_bytes,
            arena_lower_bound=program.arena_lower_bound,
        )

    def _kernel(self, name: str) -> P.Kernel:
        return P.Kernel(name, self.program.kernels[name].family)

    def _more_args(self, kernel: str) -> list[P.Arg]:
        """What a kernel takes after its buffers."""
        return [P.DimValue(self.dims.index(d)) for d in self.dims_of[kernel]]

    def _tensor(self, name: str, buffer: Buffer, alias: str | None = None) -> P.Tensor:
        place = self._place(buffer)
        shape = tuple(size_expr(s) for s in buffer.type.shape)
        return P.Tensor(name, buffer.type.dtype.name, shape, place.space, place.offset, alias)

    def _place(self, buffer: Buffer) -> P.Address:
        if buffer.space == "arena":
            assert buffer.offset is not None
            return P.Address(0, buffer.offset)
        if buffer.space == "weight":
            return P.Address(1, self.placement.weights[buffer.key])
        if buffer.space in LINEAR_SPACES:
            offset = self.placement.states[area_of(buffer.type)][buffer.key]
            return P.Address(2 if buffer.space == "state" else 3, offset)
        return P.Address(self.space_of[buffer.name], 0)

    def _body(self, body: tuple[Instruction, ...]) -> tuple[P.Instruction, ...]:
        return tuple(self._branch(step) if isinstance(step, Branch) else self._call(step) for step in body)

    def _branch(self, step: Branch) -> P.If:
        condition = self._place(self.program.buffers[step.condition])
        return P.If(condition, self._body(step.then), self._body(step.orelse))

    def _call(self, call: Call) -> P.Call:
        kernel = self.program.kernels[call.kernel]
        fresh = [b for b in call.outputs if b not in call.inputs or self.program.buffers[b].space not in LINEAR_SPACES]
        names = [*call.inputs, *fresh]
        args: list[P.Arg] = [self._place(self.program.buffers[n]) for n in names]
        args += self._more_args(call.kernel)
        moved: Size = 0
        for n in dict.fromkeys(names):
            b = self.program.buffers[n]
            moved = moved + (b.type.size * b.type.dtype.itemsize if b.space not in LINEAR_SPACES else 0)
        return P.Call(
            self.kernels.index(call.kernel), tuple(args), call.barrier, kernel.name, call.sources,
            size_expr(flops(kernel.body)), size_expr(moved),
        )  # fmt: skip


class _CudaPlanner(_Planner):
    def __init__(self, program: Program, kernels: CudaKernels, placement: Placement) -> None:
        super().__init__(program, {}, placement)
        self.cuda = kernels
        self.dims_space = len(self.spaces)
        self.spaces += [P.Space("dims", "dims"), P.Space("counters", "counters")]

    def plan(self) -> P.Plan:
        return msgspec.structs.replace(super().plan(), arena_bytes=self.arena_bytes)

    @property
    def arena_bytes(self) -> int:
        """The program's buffers, and behind them the scratch of the kernel that needs most."""
        largest = max((self._after_scratch(k) + self.cuda.triton[k] for k in self.kernels), default=0)
        return self.program.arena_bytes + largest

    def _kernel(self, name: str) -> P.Kernel:
        meta = self.cuda.meta[name]
        symbol = str(meta["cubin"]).rpartition("/")[2].removesuffix(".cubin")
        return P.Kernel(symbol, self.program.kernels[name].family, meta)

    def _more_args(self, kernel: str) -> list[P.Arg]:
        """Dims, counters and scratch where the kernel has some, then Triton's own two scratch pointers."""
        args: list[P.Arg] = [P.Address(self.dims_space, 0)]
        if self.cuda.counters[kernel]:
            args.append(P.Address(self.dims_space + 1, 0))
        if self.cuda.scratch[kernel]:
            args.append(P.Address(0, self.program.arena_bytes))
        if self.cuda.triton[kernel]:
            own: P.Arg = P.Address(0, self.program.arena_bytes + self._after_scratch(kernel))
        else:
            own = P.Constant(0)
        return [*args, own, P.Constant(0)]

    def _after_scratch(self, kernel: str) -> int:
        """Where Triton's scratch begins, behind the kernel's own; tensor maps lie at multiples of 128 bytes."""
        return -(-(self.program.arena_bytes + self.cuda.scratch[kernel]) // 128) * 128 - self.program.arena_bytes


def size_expr(size: Size) -> P.SizeExpr:
    """A size in the plan's form. Raises UnsupportedError for one with a division."""
    if isinstance(size, int):
        return size
    terms = []
    for atoms, coefficient in size.terms:
        if not all(isinstance(a, str) for a in atoms):
            raise UnsupportedError(f"size {size} divides a dynamic dim: make that dim a number with --dim NAME=N")
        terms.append((coefficient, tuple(str(a) for a in atoms)))
    return tuple(terms)
