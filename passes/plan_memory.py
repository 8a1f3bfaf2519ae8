"""Places the buffers of the arena, each at the lowest offset that no live neighbour holds, in the best of several orders."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aotc.ir.program import ALIGNMENT, Branch, Instruction, Program, buffer_bytes


@dataclass(frozen=True)
class Interval:
    """A buffer that needs `size` bytes from instruction `start` to `end`, both inclusive."""

    name: str
    size: int
    start: int
    end: int


def plan_memory(program: Program) -> Program:
    """The program with an offset for every arena buffer, the arena's size and its lower bound."""
    intervals = live_ranges(program)
    offsets = place(intervals)
    buffers = {
        n: replace(b, offset=offsets[n]) if b.space == "arena" and n in offsets else b
        for n, b in program.buffers.items()
        if b.space != "arena" or n in offsets
    }
    return replace(
        program, buffers=buffers, arena_bytes=_total(intervals, offsets), arena_lower_bound=lower_bound(intervals)
    )


def live_ranges(program: Program) -> list[Interval]:
    """From the first write to the last use. Both bodies of a branch are counted one after the other."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    time = 0

    def touch(names: tuple[str, ...]) -> None:
        for name in names:
            first.setdefault(name, time)
            last[name] = time

    def walk(body: tuple[Instruction, ...]) -> None:
        nonlocal time
        for step in body:
            time += 1
            if isinstance(step, Branch):
                touch((step.condition,))
                walk(step.then)
                walk(step.orelse)
            else:
                touch(step.inputs + step.outputs)

    walk(program.body)
    return [
        Interval(n, _aligned(buffer_bytes(b, program.dims)), first[n], last[n])
        for n, b in program.buffers.items()
        if b.space == "arena" and n in first
    ]


def place(intervals: list[Interval]) -> dict[str, int]:
    """Offsets by name: no two intervals that overlap in time overlap in memory.

    The smallest arena of several orders of placement. Where that is above the lower bound, what reaches its end is
    placed first, a few times over.
    """
    bound = lower_bound(intervals)
    best: dict[str, int] = {}
    least, order = -1, intervals
    for key in _ORDERS:
        tried = sorted(intervals, key=key)
        offsets = _place_in(tried)
        if least < 0 or _total(intervals, offsets) < least:
            best, least, order = offsets, _total(intervals, offsets), tried
        if least == bound:
            return best
    for _ in range(_REPAIRS if len(intervals) <= _MOST_REPAIRED else 0):
        current = _place_in(order)
        end = _total(intervals, current)
        top = [i for i in order if current[i.name] + i.size == end]
        order = [*top, *(i for i in order if i not in top)]
        offsets = _place_in(order)
        if _total(intervals, offsets) < least:
            best, least = offsets, _total(intervals, offsets)
        if least == bound:
            break
    return best


_ORDERS: tuple[Callable[[Interval], tuple[int | str, ...]], ...] = (
    lambda i: (-i.size, i.start, i.name),
    lambda i: (-i.size * (i.end - i.start + 1), i.start, i.name),
    lambda i: (i.start - i.end, -i.size, i.start, i.name),
    lambda i: (i.start, -i.size, i.name),
    lambda i: (-i.end, -i.size, i.name),
)
_REPAIRS, _MOST_REPAIRED = 30, 1000  # tries, and buffers: placing takes their square


def _place_in(order: list[Interval]) -> dict[str, int]:
    """Each interval at the lowest offset that no neighbour in time holds."""
    placed: list[tuple[int, Interval]] = []
    offsets: dict[str, int] = {}
    for item in order:
        offset = 0
        for other_offset, other in placed:  # sorted by offset
            if item.start > other.end or other.start > item.end:
                continue
            if offset + item.size <= other_offset:
                break
            offset = max(offset, other_offset + other.size)
        offsets[item.name] = offset
        insort(placed, (offset, item), key=lambda p: p[0])
    return offsets


def _total(intervals: list[Interval], offsets: Mapping[str, int]) -> int:
    return max((offsets[i.name] + i.size for i in intervals), default=0)


def lower_bound(intervals: list[Interval]) -> int:
    """The most bytes that live at one instruction: no plan can be smaller."""
    changes: dict[int, int] = {}
    for i in intervals:
        changes[i.start] = changes.get(i.start, 0) + i.size
        changes[i.end + 1] = changes.get(i.end + 1, 0) - i.size
    peak = live = 0
    for time in sorted(changes):
        live += changes[time]
        peak = max(peak, live)
    return peak


def check_plan(intervals: list[Interval], offsets: Mapping[str, int]) -> None:
    """Raises AssertionError where two live buffers share bytes."""
    for n, a in enumerate(intervals):
        for b in intervals[n + 1 :]:
            apart = a.start > b.end or b.start > a.end
            disjoint = offsets[a.name] + a.size <= offsets[b.name] or offsets[b.name] + b.size <= offsets[a.name]
            assert apart or disjoint, f"{a} and {b} overlap"


def _aligned(size: int) -> int:
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT
