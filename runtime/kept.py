"""What sessions keep of the cache between their turns: a slot of a static cache each, or pages of a paged one.

It is only kept while nobody needs it: who has work to do takes it from the session that was idle for longest, which
computes its tokens again at its next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from aotc.runtime.kv_cache import BlockTable, PagePool
from aotc.runtime.sequence import NO_SLOT, Sequence


@dataclass(eq=False, slots=True)
class Kept:
    """Tokens whose keys and values are in `slot`, or in `pages`."""

    tokens: list[int]
    slot: int
    pages: BlockTable | None


class KeptSessions:
    """The idle sessions of a scheduler, by name, the longest idle first. `free` are the slots of the scheduler."""

    def __init__(self, pool: PagePool | None, free: list[int]) -> None:
        self._pool, self._free = pool, free
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def slots(self) -> int:
        """Slots that are as good as free."""
        return 0 if self._pool is not None else len(self._kept)

    def keep(self, sequence: Sequence) -> None:
        """Takes over what a sequence that ends has in the cache. With pages, its slot is free."""
        name = sequence.request.session
        self.drop(name)
        slot = sequence.slot
        if self._pool is not None:
            self._free.append(slot)
            slot = NO_SLOT
        if self._pool is not None and sequence.pages is not None:  # a step that runs may have been given one more
            self._pool.shrink(sequence.pages, sequence.computed)
        self._kept[name] = Kept(sequence.tokens[: sequence.computed], slot, sequence.pages)
        sequence.slot, sequence.computed, sequence.pages = NO_SLOT, 0, None

    def slot(self, name: str) -> int | None:
        """The slot of a static cache that a session has."""
        kept = self._kept.get(name)
        return None if kept is None or kept.slot == NO_SLOT else kept.slot

    def pages(self, name: str) -> int:
        """How many pages a session has."""
        kept = self._kept.get(name)
        return kept.pages.count if kept is not None and kept.pages is not None else 0

    def trim(self, name: str, tokens: TokenIds) -> int:
        """How many of `tokens` a session has from the beginning on, at most all but the last, which says what comes next.
        Pages of others are given back. A page that others may read is kept whole, or not at all: it is never written."""
        kept = self._kept.get(name)
        if kept is None:
            return 0
        most = min(len(kept.tokens), len(tokens) - 1)
        count = next((n for n in range(most) if kept.tokens[n] != tokens[n]), most)
        if self._pool is not None and kept.pages is not None:
            size = self._pool.page_size
            if count // size < len(kept.tokens) // size:  # the last of these is a full page
                count -= count % size
            self._pool.shrink(kept.pages, count)
        del kept.tokens[count:]
        return count

    def take(self, name: str) -> Kept | None:
        """Hands over what a session has."""
        return self._kept.pop(name, None)

    def drop(self, name: str) -> None:
        """Frees what a session has."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        if kept.slot != NO_SLOT:
            self._free.append(kept.slot)
        if kept.pages is not None and self._pool is not None:
            self._pool.clear(kept.pages)

    def evict(self, but: str = "") -> bool:
        """Frees what the session has that was idle for longest. False where there is none, `but` this one."""
        name = next((n for n in self._kept if n != but), None)
        if name is None:
            return False
        self.drop(name)
        return True
