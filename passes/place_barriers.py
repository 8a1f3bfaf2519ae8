"""Drops the barriers that nothing needs: a call waits only when it touches bytes that an unfinished call touches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from aotc.ir.program import Branch, Instruction, Program, buffer_bytes

Span = tuple[str, int, int]
"""A space or buffer name, first byte, end."""


@dataclass
class _Open:
    """What calls since the last barrier read and wrote."""

    reads: set[Span] = field(default_factory=set)
    writes: set[Span] = field(default_factory=set)


def place_barriers(program: Program) -> Program:
    """The program with `barrier` set only where memory asks for it. Branches begin and end with one."""

    def span(name: str) -> Span:
        b = program.buffers[name]
        if b.space == "arena":
            assert b.offset is not None
            return "arena", b.offset, b.offset + buffer_bytes(b, program.dims)
        return name, 0, 1

    def walk(body: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        unfinished, first, done = _Open(), True, []
        for step in body:
            if isinstance(step, Branch):
                done.append(replace(step, then=walk(step.then), orelse=walk(step.orelse)))
                unfinished, first = _Open(), True
                continue
            reads, writes = {span(n) for n in step.inputs}, {span(n) for n in step.outputs}
            wait = first or _meet(reads | writes, unfinished.writes) or _meet(writes, unfinished.reads)
            if wait:
                unfinished = _Open()
            unfinished.reads |= reads
            unfinished.writes |= writes
            done.append(replace(step, barrier=wait))
            first = False
        return tuple(done)

    return replace(program, body=walk(program.body))


def _meet(a: set[Span], b: set[Span]) -> bool:
    return any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in a for y in b)
