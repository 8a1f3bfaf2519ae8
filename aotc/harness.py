"""Runs single calls of a program on the CPU and holds them against the interpreter: kernels are checked one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from aotc.artifact.plan import Address, Dim, DimValue, Kernel, Plan, Space
from aotc.artifact.plan import Call as PlanCall
from aotc.codegen.cpu.render import kernel_dims
from aotc.ir.graph import Graph, TensorType, Value
from aotc.ir.interpret import interpret
from aotc.ir.packing import PACKINGS
from aotc.ir.program import LINEAR_SPACES, Branch, Call, Instruction, Program, Strides, area_of
from aotc.ir.sizes import evaluate
from aotc.runtime.devices.cpu import CpuLibrary, CpuProgram, allocate

TOLERANCE = {"f64": 1e-9, "f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}
"""Largest relative difference (max |a - b| / max |b|) of one kernel, by the coarsest element type in it."""


@dataclass(frozen=True)
class Difference:
    """A kernel whose result left the interpreter's: where, by how much, and what it was made of."""

    kernel: str
    sources: tuple[str, ...]
    relative: float

    def __str__(self) -> str:
        return f"{self.kernel} differs by {self.relative:.2g} (from {', '.join(self.sources) or 'no source'})"


def run_kernel(
    body: Graph,
    symbol: str,
    arrays: list[np.ndarray],
    dims: Mapping[str, int],
    library: CpuLibrary,
    states: Mapping[str, int],
) -> list[np.ndarray]:
    """Runs one kernel on copies of `arrays` (the body's inputs, logical). Returns the body's outputs.

    `states` has the body's inputs that lie in slots or blocks, and the bytes between two of those.
    """
    blocks = [_place(v, a, states) for v, a in zip(body.inputs, arrays, strict=True)]
    updated = {name: source for name, source in body.aliases}
    shapes = [tuple(int(evaluate(s, dims)) for s in v.type.shape) for v in body.outputs]  # type: ignore[arg-type]
    fresh = {}
    for name, v, shape in zip(body.output_names, body.outputs, shapes, strict=True):
        if name not in updated:
            fresh[name] = allocate(int(np.prod(shape)) * v.type.dtype.itemsize)
            fresh[name][:] = 0xA5
    memory = [*blocks, *fresh.values()]
    order = kernel_dims(body)
    names = list(dims)
    spaces = tuple(Space(str(i), "input") for i in range(len(memory)))
    args = (*(Address(i, 0) for i in range(len(memory))), *(DimValue(names.index(d)) for d in order))
    call = PlanCall(0, args)
    plan = Plan(
        "kernel", tuple(Dim(n, 0, dims[n]) for n in names), spaces, (), (), (Kernel(symbol, body.name),), (call,), 0, 0
    )
    program = CpuProgram(plan, library)
    for i, block in enumerate(memory):
        program.bind("input", str(i), block.ctypes.data)
    program.run(dims)
    inputs = {v.name: (v, b) for v, b in zip(body.inputs, blocks, strict=True)}
    results = []
    for name, v, shape in zip(body.output_names, body.outputs, shapes, strict=True):
        if name in updated:
            source, block = inputs[updated[name]]
            results.append(_unplace(source, block, shape, states[source.name]))
        else:
            results.append(fresh[name].view(v.type.dtype.np)[: int(np.prod(shape))].reshape(shape))
    return results


def _place(v: Value, array: np.ndarray, states: Mapping[str, int]) -> np.ndarray:
    """Aligned physical memory of an input."""
    type_ = v.type
    if type_.packing is not None:
        pack = PACKINGS[type_.packing].pack
        assert pack is not None
        array = pack(array)
    data = np.ascontiguousarray(array)
    if v.name not in states:
        block = allocate(data.nbytes)
        block[: data.nbytes] = data.reshape(-1).view(np.uint8)
        return block
    stride = states[v.name]
    block = allocate(len(data) * stride)
    flat = data.reshape(len(data), -1).view(np.uint8)
    block[: len(data) * stride].reshape(len(data), stride)[:, : flat.shape[1]] = flat
    return block


def _unplace(v: Value, block: np.ndarray, shape: tuple[int, ...], stride: int) -> np.ndarray:
    nbytes = int(np.prod(shape[1:])) * v.type.dtype.itemsize
    rows = block[: shape[0] * stride].reshape(shape[0], stride)[:, :nbytes]
    return np.ascontiguousarray(rows).view(v.type.dtype.np).reshape(shape)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """max |a - b| / max |b| for floats; 0 or infinity for integers and bools. NaN must meet NaN, infinity itself."""
    if expected.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, expected) else np.inf
    a, b = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return np.inf
    largest = np.abs(b[finite]).max(initial=0.0)
    return (
        float(np.abs(a[finite] - b[finite]).max(initial=0.0) / largest)
        if largest
        else float(np.abs(a[finite]).max(initial=0.0))
    )


def check_calls(
    program: Program,
    inputs: Mapping[str, np.ndarray],
    weights: Callable[[str], np.ndarray],
    dims: Mapping[str, int],
    library: CpuLibrary,
    strides: Strides,
) -> Iterator[Difference | None]:
    """Runs every call on what the interpreter computed before it. Yields None, or the difference, a call."""
    env: dict[str, np.ndarray] = {}
    for b in program.buffers.values():
        if b.space in ("input", *LINEAR_SPACES):
            env[b.name] = np.array(inputs[b.key])

    def read(name: str) -> np.ndarray:
        b = program.buffers[name]
        return weights(b.key) if b.space == "weight" else env[name]

    def walk(body: tuple[Instruction, ...]) -> Iterator[Difference | None]:
        for step in body:
            if isinstance(step, Branch):
                yield from walk(step.then if bool(read(step.condition).reshape(())) else step.orelse)
            else:
                yield check(step)

    def check(step: Call) -> Difference | None:
        graph = program.kernels[step.kernel].body
        arrays = [_shaped(read(n), v.type, dims) for n, v in zip(step.inputs, graph.inputs, strict=True)]
        named = {v.name: a for v, a in zip(graph.inputs, arrays, strict=True)}
        expected = interpret(graph, named, dims=dims)
        states = {
            v.name: strides[area_of(v.type)] for v, n in zip(graph.inputs, step.inputs, strict=True)
            if program.buffers[n].space in LINEAR_SPACES
        }  # fmt: skip
        got = run_kernel(graph, step.kernel, arrays, dims, library, states)
        limit = max(TOLERANCE.get(v.type.dtype.name, 0.0) for v in graph.values())
        worst = None
        for (name, value), result, buffer in zip(expected.items(), got, step.outputs, strict=True):
            env[buffer] = value
            error = relative_error(result, value)
            if error > limit * graph.output(name).type.dtype.is_float and worst is None:
                worst = Difference(step.kernel, step.sources, error)
        return worst

    yield from walk(program.body)


def _shaped(array: np.ndarray, type_: TensorType, dims: Mapping[str, int]) -> np.ndarray:
    return array.reshape([int(evaluate(s, dims)) for s in type_.shape])  # type: ignore[arg-type]
