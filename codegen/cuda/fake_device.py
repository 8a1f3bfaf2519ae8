"""Runs programs on the CPU by what they will run on a GPU: the rendered source, under Triton's interpreter, or in CUDA
C++ compiled for the CPU.

Memory is real: one arena with the planned offsets, poisoned first, states in slots, and blocks of their own for
weights, inputs and outputs, with guard bytes around each. So a wrong offset, grid, mask or argument order gives wrong
answers or a fault here. The interpreter runs in a process of its own (`aotc.codegen.cuda.interpreter`),
which is kept for the next program.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from aotc.codegen.cuda.frame import Source
from aotc.codegen.cuda.launch import arguments, dim_order, render_program, slot_layout
from aotc.errors import DeviceError
from aotc.ir.interpret import bind_dims
from aotc.ir.ops.sample_reference import ROW
from aotc.ir.program import LINEAR_SPACES, Branch, Buffer, Instruction, Program, area_of
from aotc.ir.sizes import Dim, evaluate, upper_bound

POISON, GUARD_BYTES = 0xA5, 256


@dataclass
class Request:
    """What the interpreter's process gets: sources by symbol, blocks of bytes, the steps to run, and addresses to
    write into blocks before that."""

    sources: dict[str, Source]
    blocks: dict[str, np.ndarray]
    steps: list[Any]
    relocations: list[tuple[str, int, str]] = field(default_factory=list)


def run_request(request: Request) -> dict[str, np.ndarray]:
    """All blocks after the steps. Raises DeviceError where a kernel fails or writes outside of its block."""
    return _interpreter().run(request)


def run_program(
    program: Program, inputs: Mapping[str, np.ndarray], weights: Callable[[str], np.ndarray], arch: str = "sm80",
    widest: tuple[Dim, ...] = (),
) -> dict[str, np.ndarray]:  # fmt: skip
    """Runs a program as `aotc.ir.program.interpret_program` does, from the kernels of `arch`. `widest`: see `Setting`.

    Raises DeviceError where a kernel fails or writes outside of what it was given.
    """
    return _Replay(program, inputs, weights, arch, widest).run()


class _Replay:
    def __init__(
        self, program: Program, inputs: Mapping[str, np.ndarray], weights: Callable[[str], np.ndarray], arch: str,
        widest: tuple[Dim, ...],
    ) -> None:  # fmt: skip
        assert program.graph is not None
        self.program, self.inputs, self.weights = program, inputs, weights
        self.dims = bind_dims(
            program.graph, {program.buffers[b].key: np.shape(inputs[program.buffers[b].key]) for b in program.inputs}
        )
        self.layout = slot_layout(program)
        self.order = dim_order([program])
        self.sources: dict[str, Source] = render_program(program, arch, self.order, self.layout.strides, None, widest)
        self.relocations: list[tuple[str, int, str]] = []

    def run(self) -> dict[str, np.ndarray]:
        blocks = self._blocks()
        sources = {s.symbol: s for s in self.sources.values()}
        steps = self._steps(self.program.body)
        answer = run_request(Request(sources, blocks, steps, self.relocations))
        return {name: self._read(answer, self.program.buffers[b]) for name, b in self.program.outputs}

    def _blocks(self) -> dict[str, np.ndarray]:
        poisoned = lambda n: np.full(n, POISON, np.uint8)  # noqa: E731
        scratch = max((upper_bound(s.scratch_bytes, self.program.dims) for s in self.sources.values()), default=0)
        counters = max((upper_bound(s.counter_bytes, self.program.dims) for s in self.sources.values()), default=0)
        blocks = {
            "arena": poisoned(self.program.arena_bytes), "scratch": poisoned(scratch),
            "counters": np.zeros(counters, np.uint8),
            "dims": np.array([self.dims.get(d, 0) for d in self.order], np.int32).view(np.uint8),
        }  # fmt: skip
        for b in self.program.buffers.values():
            if b.space == "weight":
                blocks[b.name] = _bytes(self.weights(b.key))
            elif b.space == "input":
                blocks[b.name] = _bytes(self.inputs[b.key])
            elif b.space == "output":
                blocks[b.name] = poisoned(int(np.prod(self._shape(b))) * b.type.dtype.itemsize)
        for space in LINEAR_SPACES:
            held = [b for n in self.program.inputs if (b := self.program.buffers[n]).space == space]
            if held:
                blocks[space] = self._pack(held)
        for call in self.program.calls():
            if self.program.kernels[call.kernel].family == "sample":
                self._bring_settings(call.inputs[1], blocks)
        return blocks

    def _pack(self, held: list[Buffer]) -> np.ndarray:
        """Slots of the state, or blocks of the cache."""
        count = len(self.inputs[held[0].key])
        state = np.full((count, self.layout.strides[area_of(held[0].type)]), POISON, np.uint8)
        for b in held:
            part, offset = _bytes(self.inputs[b.key]).reshape(count, -1), self.layout.offsets[b.key]
            state[:, offset : offset + part.shape[1]] = part
        return state.reshape(-1)

    def _bring_settings(self, buffer: str, blocks: dict[str, np.ndarray]) -> None:
        """Sampler settings hold addresses of this process: what they point to becomes blocks of the other one."""
        for r, row in enumerate(blocks[buffer].view(ROW)):
            for name, count in (
                ("bias_ids", "bias_count"),
                ("bias_values", "bias_count"),
                ("ban_ids", "ban_count"),
                ("mask", "mask_words"),
            ):
                if row[name] and row[count] > 0:
                    block = f"{buffer}.{r}.{name}"
                    blocks[block] = np.frombuffer(ctypes.string_at(int(row[name]), int(row[count]) * 4), np.uint8)
                    offset = r * ROW.itemsize + (ROW.fields or {})[name][1]  # type: ignore[index]
                    self.relocations.append((buffer, offset, block))

    def _steps(self, body: tuple[Instruction, ...]) -> list[Any]:
        steps: list[Any] = []
        for step in body:
            if isinstance(step, Branch):
                condition = self._place(self.program.buffers[step.condition])
                steps.append(("if", condition, self._steps(step.then), self._steps(step.orelse)))
                continue
            source = self.sources[step.kernel]
            places = [self._place(self.program.buffers[b]) for b in arguments(self.program, step)]
            own = (("dims", 1), ("counters", source.counter_bytes), ("scratch", source.scratch_bytes))
            places += [(name, 0) for name, size in own if size != 0]
            grid = tuple(upper_bound(n, self.program.dims) for n in source.grid)
            steps.append(("call", source.symbol, grid, list(zip(source.signature, places, strict=True))))
        return steps

    def _place(self, b: Buffer) -> tuple[str, int]:
        if b.space == "arena":
            assert b.offset is not None
            return "arena", b.offset
        return (b.space, self.layout.offsets[b.key]) if b.space in LINEAR_SPACES else (b.name, 0)

    def _shape(self, b: Buffer) -> tuple[int, ...]:
        return tuple(int(evaluate(s, self.dims)) for s in b.type.shape)  # type: ignore[arg-type]

    def _read(self, blocks: Mapping[str, np.ndarray], b: Buffer) -> np.ndarray:
        shape, (block, offset) = self._shape(b), self._place(b)
        size = int(np.prod(shape)) * b.type.dtype.itemsize
        if b.space in LINEAR_SPACES:
            slots = blocks[block].reshape(shape[0], self.layout.strides[area_of(b.type)])
            data = np.ascontiguousarray(slots[:, offset : offset + size // shape[0]]).reshape(-1)
        else:
            data = blocks[block][offset : offset + size].copy()
        return data.view(b.type.dtype.np).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Interpreter:
    """The other process, seen from here."""

    def __init__(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-W", "ignore", "-m", "aotc.codegen.cuda.interpreter"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(self._process.communicate)

    def run(self, request: Request) -> dict[str, np.ndarray]:
        """All blocks after the steps."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        try:
            answer = pickle.load(self._process.stdout)
        except EOFError:
            _interpreter.cache_clear()
            raise DeviceError("the interpreter of kernels crashed: a kernel read or wrote outside of memory") from None
        if isinstance(answer, str):
            raise DeviceError(answer)
        return answer


@cache
def _interpreter() -> _Interpreter:
    return _Interpreter()
