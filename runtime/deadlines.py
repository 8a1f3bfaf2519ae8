"""Which sequences have run out of time."""

from __future__ import annotations

import heapq

from aotc.runtime.sequence import Sequence

_SLACK = 64  # sequences that ended early, kept at most beside as many as live


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
