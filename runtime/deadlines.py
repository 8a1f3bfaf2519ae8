"""When a call has to be done, and which sequences have run out of time."""

from __future__ import annotations

import heapq
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from aotc.errors import RequestError

if TYPE_CHECKING:
    from aotc.runtime.sequence import Sequence

_SLACK = 64  # sequences that ended early, kept at most beside as many as live


def deadline_after(now: float, deadline_ms: Any) -> float | None:
    """The time, in seconds, that is so many milliseconds after `now`; None is no limit. Raises RequestError for what is
    no length of time: NaN among them, which no comparison with a clock would ever end."""
    if deadline_ms is None:
        return None
    if not (_is_number(deadline_ms) and deadline_ms > 0):
        raise RequestError(f"deadline_ms is {_shown(deadline_ms)}: give milliseconds from now, above 0")
    return now + float(deadline_ms) / 1000


def require_time(deadline: Any) -> None:
    """Raises RequestError where a request's deadline is no time of a clock; None is no limit."""
    if deadline is not None and not _is_number(deadline):
        raise RequestError(f"the deadline is {_shown(deadline)}: give a time of the engine's clock, in seconds")


def _is_number(value: Any) -> bool:
    """Whether it is a finite one. NumPy's count."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "too large"
    return f"{value!s:.40}" if isinstance(value, Real) else f"a {type(value).__name__}"


class Deadlines:
    """Sequences with a deadline, the earliest first. Those that end before theirs are dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._limit = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Watches a sequence, if it has a deadline."""
        if sequence.request.deadline is None:
            return
        if len(self._heap) >= self._limit:
            self._heap = [item for item in self._heap if not item[2].ended]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SLACK
        heapq.heappush(self._heap, (sequence.request.deadline, sequence.number, sequence))

    def passed(self, now: float) -> list[Sequence]:
        """Takes out those whose time is up at `now` and that have not ended."""
        late = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].ended):
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.ended:
                late.append(sequence)
        return late
