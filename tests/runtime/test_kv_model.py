"""The pages of a cache against a plain model of them: owners, contents, and who is forgotten first.

The model knows no hashes: a page's content is the salt and all tokens up to the page's end. `AOTC_SOAK_STEPS` says how
many random steps to take.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

from aotc.runtime.kv_cache import BlockTable, PagePool
from aotc.runtime.prefix_cache import PrefixCache, extend_digests

STEPS = int(os.environ.get("AOTC_SOAK_STEPS", "5000"))
SIZE, MAX_PAGES = 4, 6


@dataclass(eq=False)
class Tokens:
    """A sequence: what it has computed of its tokens, in which pages."""

    salt: str
    tokens: list[int]
    computed: int
    table: BlockTable
    digests: list[bytes] = field(default_factory=list)

    @property
    def pages(self):
        return self.table.ids[: self.table.count].tolist()

    def content(self, page):
        return self.salt, tuple(self.tokens[: (page + 1) * SIZE])

    def names(self, count):
        extend_digests(self.digests, self.tokens, SIZE, count, self.salt)
        return self.digests[:count]


class Machine:
    """Random sequences over a pool. Every step is done in the model too, and both are compared."""

    def __init__(self, seed, num_pages):
        self.rng = np.random.default_rng(seed)
        self.prefixes = PrefixCache()
        self.pool = PagePool(num_pages, SIZE, self.prefixes)
        self.running: list[Tokens] = []
        self.free = list(range(num_pages))[::-1]  # the last one goes first
        self.known: dict[tuple, int] = {}  # content -> page
        self.idle: list[int] = []  # known pages without an owner, the oldest first
        self.seen = {"hits": 0, "evictions": 0, "refusals": 0, "twice": 0, "forgotten": 0}

    def step(self):
        kinds = (self.begin, self.begin, self.advance, self.advance, self.advance, self.end, self.fail)
        kind = kinds[self.rng.choice(len(kinds), p=(0.2, 0.15, 0.2, 0.2, 0.1, 0.12, 0.03))]
        if kind == self.begin or self.running:
            kind()
        self.compare()

    def begin(self):
        """Of few tokens and salts, so that prefixes are often equal."""
        tokens = (self.rng.random(self.rng.integers(1, SIZE * MAX_PAGES)) < 0.15).astype(int).tolist()
        new = Tokens(str(self.rng.integers(2)), tokens, 0, BlockTable(MAX_PAGES))
        most, found = (len(tokens) - 1) // SIZE, []
        while len(found) < most and new.content(len(found)) in self.known:
            found.append(self.known[new.content(len(found))])
        assert self.prefixes.find(new.names(most)) == found
        self.seen["hits"] += len(found)
        missing = -(-len(tokens) // SIZE) - len(found)
        fits = missing <= len(self.free) + len([p for p in self.idle if p not in found])
        assert fits == (missing <= self.pool.free_pages - sum(not self.pool.owners(p) for p in found))
        if not fits:
            self.seen["refusals"] += 1
            return
        self.pool.adopt(new.table, found)
        self.idle = [p for p in self.idle if p not in found]
        new.computed = len(found) * SIZE
        self.running.append(new)

    def take(self, count):
        """Pages that the pool must give next."""
        taken = []
        for _ in range(count):
            if self.free:
                taken.append(self.free.pop())
            else:
                taken.append(self.idle.pop(0))
                self.known = {content: page for content, page in self.known.items() if page != taken[-1]}
                self.seen["evictions"] += 1
        return taken

    def one(self):
        return self.running[self.rng.integers(len(self.running))]

    def advance(self):
        """Computes some tokens, of the prompt or beyond it."""
        this = self.one()
        if this.computed == len(this.tokens):
            if len(this.tokens) == SIZE * MAX_PAGES:
                return
            this.tokens.append(int(self.rng.random() < 0.15))
        upto = min(this.computed + int(self.rng.integers(1, 10)), len(this.tokens))
        before, missing = this.pages, max(-(-upto // SIZE) - this.table.count, 0)
        fits = missing <= len(self.free) + len(self.idle)
        assert self.pool.grow(this.table, upto) == fits
        if not fits:
            assert this.pages == before, "something was taken"
            self.seen["refusals"] += 1
            return
        assert this.pages == before + self.take(missing)
        for n in range(this.computed // SIZE, upto // SIZE):
            self.prefixes.publish(this.pages[n], this.names(n + 1)[n])
            self.seen["twice"] += this.content(n) in self.known
            self.known.setdefault(this.content(n), this.pages[n])
        this.computed = upto

    def end(self):
        this = self.one()
        self.running.remove(this)
        pages = this.pages
        self.pool.clear(this.table)
        assert this.table.count == 0
        for page in reversed(pages):
            if not any(page in other.pages for other in self.running):
                (self.idle if page in self.known.values() else self.free).append(page)

    def fail(self):
        """Nobody finds pages of a sequence that failed."""
        this = self.one()
        for page in this.pages:
            self.prefixes.forget(page)
        self.seen["forgotten"] += 1
        self.known = {content: page for content, page in self.known.items() if page not in this.pages}

    def compare(self):
        held = [p for s in self.running for p in s.pages]
        pages = range(self.pool.num_pages)
        assert [self.pool.owners(p) for p in pages] == [held.count(p) for p in pages]
        assert list(self.prefixes.idle) == self.idle
        assert sorted(self.free + self.idle + list(set(held))) == list(pages), "a page was lost, or is in two places"
        assert self.pool.free_pages == len(self.free) + len(self.idle)
        assert [self.prefixes.knows(p) for p in pages] == [p in self.known.values() for p in pages]
        for page in {p for p in held if held.count(p) > 1}:
            owners = [(s, s.pages.index(page)) for s in self.running if page in s.pages]
            assert len({s.content(n) for s, n in owners}) == 1, "two owners of unequal prefixes"
            assert all((n + 1) * SIZE <= s.computed for s, n in owners), "a shared page that is not full"


@pytest.mark.parametrize(("seed", "num_pages"), [(0, 6), (1, 10), (2, 17), (3, 30)])
def test_every_page_is_where_the_model_says(seed, num_pages):
    machine = Machine(seed, num_pages)
    for _ in range(STEPS):
        machine.step()
    assert all(machine.seen.values()), f"nothing of a kind was seen: {machine.seen}"
    while machine.running:
        machine.end()
        machine.compare()
    assert machine.pool.free_pages == num_pages
