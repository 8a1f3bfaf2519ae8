"""Sequences that lose their pages and get them back: what is copied, what is computed again. No device code.

Nobody waits for a copy. Who leaves has no slot any more, and its pages until they are copied; who comes back has slot and
pages, and runs once all is there. Others run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from aotc.runtime.kv_cache import PagePool
from aotc.runtime.offload import Offload, SavedPages
from aotc.runtime.sequence import Sequence


class PageMoves:
    """The pages on their way. `leaving` are the waiting sequences that still have some; `publish` makes the full pages of
    a sequence known that hold tokens from a number on. Without a pool there is nothing to move."""

    def __init__(
        self, pool: PagePool | None, offload: Offload | None, publish: Callable[[Sequence, int], None]
    ) -> None:
        self._pool, self._offload, self._publish = pool, offload, publish
        self.leaving: list[Sequence] = []

    def save(self, sequence: Sequence) -> None:
        """Begins to copy what a sequence has computed, if that costs less than to compute it again."""
        if self._offload is None:
            return
        assert self._pool is not None and sequence.pages is not None
        count = self._pool.pages_for(sequence.computed)
        if sequence.saved is not None:  # it was about to come back
            self._offload.stop(sequence.saved)
        elif self._offload.worth(sequence.computed, count):
            sequence.saved = self._offload.save(sequence.pages.ids[:count], sequence.computed)

    def leave(self, sequence: Sequence) -> None:
        """Gives the pages back that are copied, from the last one on: whoever writes there comes after the copy."""
        assert self._pool is not None and sequence.pages is not None
        left = self._left(sequence.saved) if sequence.saved is not None else 0
        self._pool.shrink(sequence.pages, left * self._pool.page_size)
        if left and sequence not in self.leaving:
            self.leaving.append(sequence)
        elif not left and sequence in self.leaving:
            self.leaving.remove(sequence)

    def bring_back(self, sequence: Sequence, saved: SavedPages) -> None:
        """Takes pages for what was saved and begins to copy it back, but for what is in the pages that it has."""
        assert self._pool is not None and self._offload is not None and sequence.pages is not None
        if saved.computed <= sequence.computed:
            self.drop(sequence)
            return
        first = sequence.pages.count
        grown = self._pool.grow(sequence.pages, saved.computed)
        assert grown
        self._offload.load(saved, first, sequence.pages.ids[first : sequence.pages.count])
        self._come_back(sequence, saved)

    def go_on(self, running: list[Sequence]) -> None:
        """Goes on with all copies, of those that leave and of those among the running ones that come back."""
        for sequence in list(self.leaving):
            self.leave(sequence)
        for sequence in running:
            if sequence.saved is not None:
                self._come_back(sequence, sequence.saved)

    def drop(self, sequence: Sequence) -> None:
        """Copies nothing of it any more, and frees the memory. Its pages are the caller's to give back."""
        if sequence.saved is not None:
            assert self._offload is not None
            self._offload.drop(sequence.saved)
            sequence.saved = None
        if sequence in self.leaving:
            self.leaving.remove(sequence)

    def _come_back(self, sequence: Sequence, saved: SavedPages) -> None:
        """Lets a sequence run whose pages are all there, for steps that begin from now on."""
        if not self._left(saved):
            begin, sequence.computed = sequence.computed, saved.computed
            self.drop(sequence)
            self._publish(sequence, begin)

    def _left(self, saved: SavedPages) -> int:
        assert self._offload is not None
        return self._offload.left(saved)
