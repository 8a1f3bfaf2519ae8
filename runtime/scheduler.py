"""Chooses what the next step computes: running sequences first, then new ones, within a budget of tokens.

No device code: slots and pages are numbers, steps are lists of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from aotc.runtime.kv_cache import PagePool
from aotc.runtime.sequence import Request, Row, Sequence


class Waiting(NamedTuple):
    """A request that has no slot, and the tokens that it was given before it lost one."""

    request: Request
    outputs: list[int]


class Scheduler:
    """First come, first served over `max_num_seqs` slots; prompts longer than the budget are taken in chunks.

    With a pool, a sequence takes pages as it grows. When there are none, the youngest sequence gives its own back and
    waits, first in the queue: it is computed again from its tokens, and goes on as if nothing had been. So the oldest
    one always goes on, provided that the pool holds any one sequence whole. `running` is in the order of arrival.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        admit: Callable[[Request, int, list[int]], Sequence],
        pool: PagePool | None = None,
    ) -> None:
        self.waiting: deque[Waiting] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._free = list(range(max_num_seqs))[::-1]
        self._budget, self._admit, self.pool = max_num_batched_tokens, admit, pool

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(Waiting(request, []))

    def schedule(self) -> list[Row]:
        """Rows of the next step. One-token rows come first: decoding waits for no prompt longer than the budget."""
        budget = self._budget
        rows: dict[Sequence, Row] = {}
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            if not budget or sequence not in self.running:  # preempted for one before it
                continue
            row = self._row(sequence, budget)
            for victim in self._make_room(row):
                budget += rows.pop(victim).count if victim in rows else 0
            if sequence in self.running:
                rows[sequence] = row
                budget -= row.count
        while budget and self.waiting and self._free and self._fits(self.waiting[0]):
            request, outputs = self.waiting[0]
            sequence = self._admit(request, self._free[-1], outputs)  # when it raises, nothing has changed
            self.waiting.popleft()
            self._free.pop()
            self.running.append(sequence)
            rows[sequence] = row = self._row(sequence, budget)
            assert not self._make_room(row)
            budget -= row.count
        return list(rows.values())

    def release(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its slot and pages."""
        self.running.remove(sequence)
        self._free.append(sequence.slot)
        if self.pool is not None and sequence.pages is not None:
            self.pool.clear(sequence.pages)

    def cancel(self, request_id: str) -> bool:
        """Drops a request, waiting or running. False when it is not known."""
        for item in self.waiting:
            if item.request.request_id == request_id:
                self.waiting.remove(item)
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
        known = sum(s.pending for s in self.running)
        known += sum(len(w.request.prompt_token_ids) + len(w.outputs) for w in admitted)
        return min(self._budget, known)

    def _row(self, sequence: Sequence, budget: int) -> Row:
        count = min(sequence.pending, budget)
        return Row(sequence, sequence.computed, count, count == sequence.pending)

    def _fits(self, item: Waiting) -> bool:
        """Whether there are pages for all tokens of a request, also where a step computes a part of them."""
        pool, tokens = self.pool, len(item.request.prompt_token_ids) + len(item.outputs)
        return pool is None or pool.pages_for(tokens) <= pool.free_pages

    def _make_room(self, row: Row) -> list[Sequence]:
        """Takes the pages of a row, from the youngest sequences where there are none; returns those, which wait now.
        The row's own sequence may be among them."""
        victims: list[Sequence] = []
        if self.pool is None or row.sequence.pages is None:
            return victims
        while not self.pool.grow(row.sequence.pages, row.start + row.count):
            victims.append(self.running[-1])
            self._preempt(victims[-1])
            if victims[-1] is row.sequence:
                break
        return victims

    def _preempt(self, sequence: Sequence) -> None:
        self.release(sequence)
        self.waiting.appendleft(Waiting(sequence.request, sequence.outputs))
        self.preemptions += 1
