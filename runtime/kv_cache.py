"""The KV cache of a load: how many blocks it has, and which sequence holds which page. No device code.

A static cache has a block a slot. A paged one has pages that a sequence takes as it grows; a page may have several
owners (equal prefixes: `prefix_cache.py`), and returns to the pool with the last of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from aotc.artifact.manifest import KVCache, Manifest
from aotc.errors import RequestError
from aotc.runtime.prefix_cache import PrefixCache

_UNITS = {"": 1, **{f"{p}B": 1000**n for n, p in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate(("", "K", "M", "G", "T")) if n}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)


@dataclass(frozen=True)
class CachePlan:
    """`blocks` of a layout in the cache, for `seqs` sequences at once. `max_pages` is the width of a block table, 0 for
    a static cache."""

    kind: KVCache
    blocks: int
    seqs: int
    max_pages: int

    @property
    def nbytes(self) -> int:
        return self.blocks * self.kind.block_bytes

    @property
    def page_size(self) -> int:
        """Tokens of a page, 0 for a static cache."""
        return self.kind.block_tokens if self.max_pages else 0


def choose_cache(manifest: Manifest, layout: str | None, usual: str = "static") -> KVCache:
    """The artifact's cache of a layout; None takes the usual one where it is there. Raises RequestError."""
    inside = {c.layout: c for c in manifest.kv_caches}
    if layout is None:
        return inside.get(usual) or next(iter(inside.values()))
    if layout not in inside:
        raise RequestError(
            f"KV layout {layout} is not among those of the artifact ({', '.join(inside)}): "
            f"compile with --kv-layout both, or leave it out"
        )
    return inside[layout]


def plan_cache(kind: KVCache, seqs: int, max_model_len: int, memory: int | None, budget: int | None) -> CachePlan:
    """How many blocks to take: those that fit `memory` bytes, or as many as `seqs` sequences of `max_model_len` tokens
    can fill, and no more than fit `budget`. Raises RequestError where `memory` holds none."""
    paged = kind.layout == "paged"
    max_pages = -(-max_model_len // kind.block_tokens) if paged else 0
    blocks = seqs * max(max_pages, 1)
    if memory is not None:
        fit = memory // kind.block_bytes
        if not fit:
            raise RequestError(
                f"a KV cache of {memory} bytes holds no {'page' if paged else 'sequence'}: one takes {kind.block_bytes}"
            )
        blocks = fit if paged else min(blocks, fit)
    elif paged and budget is not None:
        blocks = max(min(blocks, budget // kind.block_bytes), 1)
    return CachePlan(kind, blocks, seqs if paged else blocks, max_pages)


def parse_bytes(size: int | str | None) -> int | None:
    """2147483648, "2GiB", "512 MB" as bytes. Raises RequestError."""
    if size is None:
        return None
    match = _SIZE.fullmatch(str(size).strip())
    if match is None or match[2] not in _UNITS:
        raise RequestError(f"{str(size)[:40]!r} is no size of memory: write bytes, or a number with MiB or GiB")
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(float(match[1]))


class BlockTable:
    """The pages of one sequence, in order: `ids` i32 [max_pages], of which the first `count` are its own."""

    def __init__(self, max_pages: int) -> None:
        self.ids = np.zeros(max_pages, np.int32)
        self.count = 0


class PagePool:
    """Pages 0 .. num_pages, each free or held by one or more owners.

    With `prefixes`, a page whose content is known there keeps it after its last owner: it is as good as free, and taken
    for something else once no other page is free, the one that nobody used for longest first.
    """

    def __init__(self, num_pages: int, page_size: int, prefixes: PrefixCache | None = None) -> None:
        self.num_pages, self.page_size, self.prefixes = num_pages, page_size, prefixes
        self._free = list(range(num_pages))[::-1]
        self._owners = [0] * num_pages

    @property
    def free_pages(self) -> int:
        """Pages without an owner."""
        return len(self._free) + (len(self.prefixes.idle) if self.prefixes else 0)

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold."""
        return self.num_pages * self.page_size

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self) -> int:
        """A page that nobody has, with one owner. Raises IndexError when there is none."""
        page = self.prefixes.evict() if self.prefixes and not self._free else self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds an owner to a page that has one, or whose content is known."""
        if not self._owners[page]:
            assert self.prefixes and page in self.prefixes.idle, f"page {page} is free"
            del self.prefixes.idle[page]
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Takes an owner away; the page is free after the last."""
        assert self._owners[page] > 0, f"page {page} is free"
        self._owners[page] -= 1
        if not self._owners[page]:
            if self.prefixes and self.prefixes.knows(page):
                self.prefixes.idle[page] = None  # the youngest of them
            else:
                self._free.append(page)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Gives a table the pages that it lacks for `tokens` tokens: all of them, or none and False."""
        missing = self.pages_for(tokens) - table.count
        if missing <= 0:
            return True
        if missing > self.free_pages:
            return False
        for _ in range(missing):
            table.ids[table.count] = self.allocate()
            table.count += 1
        return True

    def adopt(self, table: BlockTable, pages: list[int]) -> None:
        """Makes an empty table begin with pages that others have or had."""
        assert not table.count
        for page in pages:
            self.share(page)
        table.ids[: len(pages)] = pages
        table.count = len(pages)

    def shrink(self, table: BlockTable, tokens: int) -> None:
        """Gives back what a table has more than `tokens` tokens need."""
        while table.count > self.pages_for(tokens):
            table.count -= 1
            self.release(int(table.ids[table.count]))

    def clear(self, table: BlockTable) -> None:
        """Gives all pages of a table back, the last one first: of a known prefix, its end is forgotten first."""
        for page in table.ids[: table.count][::-1].tolist():
            self.release(page)
        table.count = 0
