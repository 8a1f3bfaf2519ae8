"""The Program IR: what runs. An ordered list of kernel calls on buffers, with barriers between them.

Facts between kernels live here: memory plan, barriers, edges. Lowering makes a program from a fused graph, program
passes refine it, and `aotc.compiler` prints it as the plan of an artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from aotc.ir.graph import Graph, TensorType
from aotc.ir.interpret import bind_dims, interpret
from aotc.ir.sizes import Dim, evaluate, symbol, upper_bound

ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a CPU


LINEAR_SPACES = ("state", "kv")
"""Spaces of what is updated in place and lives from step to step."""

Strides = Mapping[str, int]
"""Bytes between the blocks of each area: `state` (a sequence each), `static` (a sequence) and `paged` (a page) caches."""


def area_of(type_: TensorType) -> str:
    """Where a linear value lives: state, or the KV cache in a layout. Nothing else that is linear has five axes."""
    if type_.rank != 5:
        return "state"
    return "paged" if type_.shape[0] == symbol("pages") else "static"


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory. `space` is arena, weight, input, output, state or kv; `key` names it there.

    `offset` is its place in the arena, in bytes, once planned.
    """

    name: str
    type: TensorType
    space: str
    key: str = ""
    offset: int | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel by its meaning: the template family and the graph that it computes."""

    name: str
    family: str
    body: Graph


@dataclass(frozen=True)
class Call:
    """Runs a kernel on buffers: those of the body's inputs, then of its outputs. An output that updates an input
    in place names the same buffer. `barrier` waits for all calls before it."""

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...] = ()
    barrier: bool = True


@dataclass(frozen=True)
class Branch:
    """Runs one of two bodies, as the condition (one bool) says."""

    condition: str
    then: tuple[Instruction, ...]
    orelse: tuple[Instruction, ...]


Instruction = Call | Branch


@dataclass(frozen=True)
class Program:
    """A program over named buffers. `arena_lower_bound` is the most bytes that live at once."""

    name: str
    dims: tuple[Dim, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    buffers: Mapping[str, Buffer]
    kernels: Mapping[str, Kernel]
    body: tuple[Instruction, ...]
    arena_bytes: int = 0
    arena_lower_bound: int = 0
    graph: Graph | None = field(default=None, compare=False)

    def calls(self) -> Iterator[Call]:
        """Every call in order, both bodies of branches included."""
        yield from _calls(self.body)


def _calls(body: tuple[Instruction, ...]) -> Iterator[Call]:
    for step in body:
        if isinstance(step, Call):
            yield step
        else:
            yield from _calls(step.then)
            yield from _calls(step.orelse)


def map_calls(body: tuple[Instruction, ...], change: Callable[[Call], Call]) -> tuple[Instruction, ...]:
    """The body with each call replaced."""
    return tuple(
        change(step) if isinstance(step, Call)
        else replace(step, then=map_calls(step.then, change), orelse=map_calls(step.orelse, change))
        for step in body
    )  # fmt: skip


def buffer_bytes(buffer: Buffer, dims: tuple[Dim, ...]) -> int:
    """Bytes at the dims' upper bounds, without alignment."""
    return upper_bound(buffer.type.size, dims) * buffer.type.dtype.itemsize


def interpret_program(
    program: Program, inputs: Mapping[str, np.ndarray], weights: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
    """Runs a program in numpy on a real arena, poisoned first, so that a wrong memory plan gives wrong answers.

    States are read from `inputs` and returned updated, by the names of their outputs.
    """
    signature = [program.buffers[b] for b in program.inputs]
    shapes = {b.key: np.shape(inputs[b.key]) for b in signature}
    assert program.graph is not None
    dims = bind_dims(program.graph, shapes)
    memory = _Memory(program, dims, inputs, weights)
    _execute(program.body, program, memory)
    return {name: memory.read(buffer).copy() for name, buffer in program.outputs}


class _Memory:
    def __init__(
        self, program: Program, dims: dict[str, int], inputs: Mapping[str, np.ndarray],
        weights: Callable[[str], np.ndarray],
    ) -> None:  # fmt: skip
        self.program, self.dims, self.weights = program, dims, weights
        self.arena = np.full(program.arena_bytes, 0xA5, np.uint8)
        self.named: dict[str, np.ndarray] = {}
        for b in program.buffers.values():
            if b.space in ("input", *LINEAR_SPACES):
                self.named[b.name] = np.array(inputs[b.key])
            elif b.space == "output":
                self.named[b.name] = np.zeros(self.shape(b), b.type.dtype.np)

    def shape(self, b: Buffer) -> tuple[int, ...]:
        return tuple(int(evaluate(s, self.dims)) for s in b.type.shape)  # type: ignore[arg-type]

    def read(self, name: str) -> np.ndarray:
        b = self.program.buffers[name]
        if b.space == "weight":
            return self.weights(b.key)
        return self.named[name] if b.space != "arena" else self._view(b)

    def _view(self, b: Buffer) -> np.ndarray:
        shape = self.shape(b)
        count = int(np.prod(shape)) * b.type.dtype.itemsize
        assert b.offset is not None, f"buffer {b.name} has no place in the arena"
        return self.arena[b.offset : b.offset + count].view(b.type.dtype.np).reshape(shape)

    def write(self, name: str, array: np.ndarray) -> None:
        self.read(name).reshape(array.shape)[...] = array


def _execute(body: tuple[Instruction, ...], program: Program, memory: _Memory) -> None:
    for step in body:
        if isinstance(step, Branch):
            taken = step.then if bool(memory.read(step.condition).reshape(())) else step.orelse
            _execute(taken, program, memory)
            continue
        graph = program.kernels[step.kernel].body
        arrays = {
            v.name: memory.read(b).reshape([int(evaluate(s, memory.dims)) for s in v.type.shape])  # type: ignore[arg-type]
            for v, b in zip(graph.inputs, step.inputs, strict=True)
        }
        results = interpret(graph, arrays, dims=memory.dims)
        for name, buffer in zip(graph.output_names, step.outputs, strict=True):
            memory.write(buffer, results[name])
