"""Chooses what the next step computes: running sequences first, then new ones, within a budget of tokens.

No device code: slots and pages are numbers, steps are lists of rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from aotc.runtime.deadlines import Deadlines
from aotc.runtime.kept import KeptSessions
from aotc.runtime.kv_cache import PagePool
from aotc.runtime.offload import Offload
from aotc.runtime.page_moves import PageMoves
from aotc.runtime.prefix_cache import extend_digests
from aotc.runtime.sequence import NO_SLOT, Row, Sequence

_TURN = attrgetter("turn")


class Scheduler:
    """By priority, then first come, first served over `max_num_seqs` slots; prompts longer than the budget are taken in
    chunks. `running` and `waiting` are in the order of their turns.

    With a pool, a sequence takes pages as it grows. When there are none, the last one in the order of turns gives its own
    back and waits: it is computed again from its tokens, or its pages are copied to host memory and back, and goes on as
    if nothing had been (`page_moves.py`). So the first one always goes on, provided that the pool holds any one sequence
    whole.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        start: Callable[[Sequence], None],
        pool: PagePool | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`start` prepares a sequence's slot; when it raises, the sequence waits on."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._known: dict[str, Sequence] = {}  # both, by their requests' ids
        self.preemptions = 0
        self.blocked = False  # the first that waits has a slot to go to, but not the pages
        self._deadlines = Deadlines()
        self._free = list(range(max_num_seqs))[::-1]
        self.kept = KeptSessions(pool, self._free)
        self._budget, self._start, self.pool = max_num_batched_tokens, start, pool
        self._moves = PageMoves(pool, offload, self._publish)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def knows(self, request_id: str) -> bool:
        """Whether a request waits or runs."""
        return request_id in self._known

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that waits, with a number of its own, and of a request that is not known."""
        self._known[sequence.request.request_id] = sequence
        insort(self.waiting, sequence, key=_TURN)
        self._deadlines.add(sequence)

    def schedule(self) -> list[Row]:
        """Rows of the next step. One-token rows come first: decoding waits for no prompt longer than the budget."""
        budget, self.blocked = self._budget, False
        rows: dict[Sequence, Row] = {}
        self._moves.go_on(self.running)
        there = [s for s in self.running if s.saved is None]
        decoding = [s for s in there if s.pending == 1 and not s.complete]
        for sequence in [*decoding, *(s for s in there if s.pending > 1)]:
            if not budget:
                break
            if sequence.slot == NO_SLOT:  # preempted for one before it
                continue
            row = self._row(sequence, budget)
            without = self._make_room(row)
            for victim in without:
                budget += rows.pop(victim).count if victim in rows else 0
            if sequence not in without:
                rows[sequence] = row
                budget -= row.count
        while budget and self.waiting and self.free_slots and not self.blocked:
            sequence = self.waiting[0]
            found = self._found(sequence)
            self.blocked = not self._fits(sequence, found)
            if self.blocked:
                break
            self._admit(sequence, found)
            if sequence.saved is not None:  # it comes back
                continue
            rows[sequence] = row = self._row(sequence, budget)
            assert not self._make_room(row)
            budget -= row.count
        return list(rows.values())

    @property
    def copying(self) -> bool:
        """Whether sequences wait for copies of their pages, or for pages that are copied."""
        return bool(self._moves.leaving) or any(s.saved is not None for s in self.running)

    @property
    def can_go_ahead(self) -> bool:
        """Whether a step can be chosen before the one that runs has ended: not where pages might have to be taken from a
        sequence."""
        if self.pool is None:
            return True
        return self.pool.free_pages >= len(self.running) + self._budget // self.pool.page_size

    def land(self, row: Row) -> None:
        """Takes note that a row was computed, and that its token, if it samples, is in `tokens`. Pages that it filled
        become known."""
        row.sequence.land(row)
        self._publish(row.sequence, row.start)

    def end(self, sequence: Sequence, faulty: bool = False) -> None:
        """Ends a sequence, waiting or running, and frees all that it has: a step that runs may still write there, but
        none that begins later reads it. Of a faulty one, no page is shared any more."""
        sequence.forget_steps()
        self._moves.drop(sequence)
        if sequence.slot != NO_SLOT and sequence.request.session and not faulty:
            _take_out(self.running, sequence)
            self.kept.keep(sequence)
        elif sequence.slot != NO_SLOT:
            if faulty:
                self._disown(sequence)
            self._release(sequence)
            self._clear_pages(sequence)
        else:
            _take_out(self.waiting, sequence)
            self._clear_pages(sequence)
        del self._known[sequence.request.request_id]
        sequence.ended = True

    def cancel(self, request_id: str) -> bool:
        """Drops a request, waiting or running. False when it is not known."""
        sequence = self._known.get(request_id)
        if sequence is None:
            return False
        self.end(sequence)
        return True

    def expire(self, now: float) -> list[Sequence]:
        """Ends the sequences whose deadline has passed; returns them."""
        late = self._deadlines.passed(now)
        for sequence in late:
            self.end(sequence)
        return late

    @property
    def free_slots(self) -> int:
        """Slots that a request can have: nobody's, and those of idle sessions."""
        return len(self._free) + self.kept.slots

    @property
    def next_tokens(self) -> int:
        """How many tokens the next step computes, at most."""
        admitted = islice(self.waiting, self.free_slots)
        return min(self._budget, sum(s.pending for s in self.running) + sum(s.pending for s in admitted))

    def _row(self, sequence: Sequence, budget: int) -> Row:
        count = min(sequence.pending, budget)
        return Row(sequence, sequence.reached, count, count == sequence.pending)

    def _found(self, sequence: Sequence) -> list[int]:
        """Known pages that a sequence can begin with, none where its session has kept more: only one of both is there
        afterwards. The last token is always computed: it says what comes next."""
        pool, session = self.pool, sequence.request.session_key
        kept = self.kept.trim(session, sequence.tokens) if sequence.saved is None else 0
        if pool is None:
            return []
        found: list[int] = []
        if pool.prefixes is not None:
            full = (len(sequence.tokens) - 1) // pool.page_size
            extend_digests(sequence.digests, sequence.tokens, pool.page_size, full, sequence.request.cache_salt)
            found = pool.prefixes.find(sequence.digests[:full])
        if kept > len(found) * pool.page_size:
            return []
        self.kept.drop(session)
        return found

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Makes the full pages known that hold tokens from `start` on."""
        if self.pool is None or self.pool.prefixes is None or sequence.pages is None:
            return
        size = self.pool.page_size
        first, last = start // size, sequence.computed // size
        if first < last:
            extend_digests(sequence.digests, sequence.tokens, size, last, sequence.request.cache_salt)
            for n in range(first, last):
                self.pool.prefixes.publish(int(sequence.pages.ids[n]), sequence.digests[n])

    def _fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether there are pages for all tokens of a sequence, also where a step computes a part of them."""
        pool, session = self.pool, sequence.request.session_key
        if pool is None:
            return True
        if sequence in self._moves.leaving:
            return False
        missing = pool.pages_for(len(sequence.tokens)) - len(found) - self.kept.pages(session)
        while missing > pool.free_pages - sum(not pool.owners(p) for p in found):
            if not self.kept.evict(but=session):
                return False
        return True

    def _admit(self, sequence: Sequence, found: list[int]) -> None:
        session = sequence.request.session_key
        own = self.kept.slot(session)
        if own is None and not self._free:
            self.kept.evict()
        sequence.slot = self._free[-1] if own is None else own
        try:
            self._start(sequence)
        except BaseException:
            sequence.slot = NO_SLOT
            raise
        if own is None:
            self._free.pop()
        del self.waiting[0]
        insort(self.running, sequence, key=_TURN)
        kept = self.kept.take(session)
        if kept is not None:
            sequence.computed, sequence.pages = len(kept.tokens), kept.pages
        elif self.pool is not None:
            assert sequence.pages is not None
            self.pool.adopt(sequence.pages, found)
            sequence.computed = len(found) * self.pool.page_size
        if sequence.cached_tokens is None:  # a request counts when it first runs, not when it comes back
            sequence.cached_tokens = sequence.computed
            if self.pool is not None and self.pool.prefixes is not None:
                self.pool.prefixes.queries += len(sequence.tokens)
                self.pool.prefixes.hits += sequence.computed
        if sequence.saved is not None:
            self._moves.bring_back(sequence, sequence.saved)

    def _make_room(self, row: Row) -> list[Sequence]:
        """Takes the pages of a row, from the last sequences where there are none. Returns who is not in the step: those
        wait now; or the row's own, if pages are still being copied that it could have."""
        without: list[Sequence] = []
        if self.pool is None or row.sequence.pages is None:
            return without
        while not self.pool.grow(row.sequence.pages, row.start + row.count):
            if self.kept.evict():
                continue
            self.blocked = True
            if self._moves.leaving:
                return [*without, row.sequence]
            without.append(self.running[-1])
            self._preempt(without[-1])
            if without[-1] is row.sequence:
                break
        return without

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.flying, "a step runs that computes it"
        self._moves.save(sequence)
        self._release(sequence)
        self._moves.leave(sequence)
        insort(self.waiting, sequence, key=_TURN)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Takes the slot away."""
        _take_out(self.running, sequence)
        self._free.append(sequence.slot)
        sequence.slot, sequence.computed = NO_SLOT, 0

    def _clear_pages(self, sequence: Sequence) -> None:
        if self.pool is not None and sequence.pages is not None:
            self.pool.clear(sequence.pages)

    def _disown(self, sequence: Sequence) -> None:
        """Makes nobody begin with what a sequence has computed."""
        if self.pool is not None and self.pool.prefixes is not None and sequence.pages is not None:
            for page in sequence.pages.ids[: sequence.pages.count].tolist():
                self.pool.prefixes.forget(page)


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from a list that is in the order of turns: no two have the same."""
    place = bisect_left(sequences, sequence.turn, key=_TURN)
    assert sequences[place] is sequence
    del sequences[place]
