"""Chooses what the next step computes: running sequences first, then new ones, within a budget of tokens.

No device code: slots are numbers, steps are lists of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from aotc.runtime.sequence import Request, Row, Sequence


class Scheduler:
    """First come, first served over `max_num_seqs` slots; prompts longer than the budget are taken in chunks."""

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, admit: Callable[[Request, int], Sequence]
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []
        self._free = list(range(max_num_seqs))[::-1]
        self._budget, self._admit = max_num_batched_tokens, admit

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[Row]:
        """Rows of the next step. One-token rows come first: decoding waits for no prompt longer than the budget."""
        budget = self._budget
        rows: list[Row] = []
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            if budget:
                rows.append(self._row(sequence, budget))
                budget -= rows[-1].count
        while budget and self.waiting and self._free:
            sequence = self._admit(self.waiting[0], self._free[-1])  # when it raises, nothing has changed
            self.waiting.popleft()
            self._free.pop()
            self.running.append(sequence)
            rows.append(self._row(sequence, budget))
            budget -= rows[-1].count
        return rows

    def release(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its slot."""
        self.running.remove(sequence)
        self._free.append(sequence.slot)

    def cancel(self, request_id: str) -> bool:
        """Drops a request, waiting or running. False when it is not known."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return True
        for sequence in self.running:
            if sequence.request.request_id == request_id:
                self.release(sequence)
                return True
        return False

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def next_tokens(self) -> int:
        """How many tokens the next step computes, at most."""
        admitted = islice(self.waiting, len(self._free))
        known = sum(s.pending for s in self.running) + sum(len(r.prompt_token_ids) for r in admitted)
        return min(self._budget, known)

    def _row(self, sequence: Sequence, budget: int) -> Row:
        count = min(sequence.pending, budget)
        return Row(sequence, sequence.computed, count, count == sequence.pending)
