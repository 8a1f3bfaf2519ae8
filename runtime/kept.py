"""What sessions keep of the cache between their turns: a slot of a static cache each, or pages of a paged one.

It is only kept while nobody needs it: who has work to do takes it from the session that was idle for longest, which
computes its tokens again at its next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from aotc.runtime.kv_cache import BlockTable, PagePool
from aotc.runtime.sequence import NO_SLOT, Sequence, SessionKey


@dataclass(eq=False, slots=True)
class Kept:
    """Tokens whose keys and values are in `slot`, or in `pages`."""

    tokens: list[int]
    slot: int
    pages: BlockTable | None


class KeptSessions:
    """The idle sessions of a scheduler, by key, the longest idle first. `free` are the slots of the scheduler."""

    def __init__(self, pool: PagePool | None, free: list[int]) -> None:
        self._pool, self._free = pool, free
        self._kept: OrderedDict[SessionKey, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def slots(self) -> int:
        """Slots that are as good as free."""
        return 0 if self._pool is not None else len(self._kept)

    def keep(self, sequence: Sequence) -> None:
        """Takes over what a sequence that ends has in the cache. With pages, its slot is free."""
        key = sequence.request.session_key
        self.drop(key)
        slot = sequence.slot
        if self._pool is not None:
            self._free.append(slot)
            slot = NO_SLOT
        if self._pool is not None and sequence.pages is not None:  # a step that runs may have been given one more
            self._pool.shrink(sequence.pages, sequence.computed)
        self._kept[key] = Kept(sequence.tokens[: sequence.computed], slot, sequence.pages)
        sequence.slot, sequence.computed, sequence.pages = NO_SLOT, 0, None

    def slot(self, key: SessionKey) -> int | None:
        """The slot of a static cache that a session has."""
        kept = self._kept.get(key)
        return None if kept is None or kept.slot == NO_SLOT else kept.slot

    def pages(self, key: SessionKey) -> int:
        """How many pages a session has."""
        kept = self._kept.get(key)
        return kept.pages.count if kept is not None and kept.pages is not None else 0

    def trim(self, key: SessionKey, tokens: TokenIds) -> int:
        """How many of `tokens` a session has from the beginning on, at most all but the last, which says what comes next.
        Pages of others are given back. A page that others may read is kept whole, or not at all: it is never written."""
        kept = self._kept.get(key)
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

    def take(self, key: SessionKey) -> Kept | None:
        """Hands over what a session has."""
        return self._kept.pop(key, None)

    def drop(self, key: SessionKey) -> None:
        """Frees what a session has."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        if kept.slot != NO_SLOT:
            self._free.append(kept.slot)
        if kept.pages is not None and self._pool is not None:
            self._pool.clear(kept.pages)

    def evict(self, but: SessionKey | None = None) -> bool:
        """Frees what the session has that was idle for longest. False where there is none, `but` this one."""
        key = next((k for k in self._kept if k != but), None)
        if key is None:
            return False
        self.drop(key)
        return True
