"""Pages: never two owners unless shared, never lost. How large a cache is, and how its size is written."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aotc.artifact.manifest import KVCache, Manifest, Model
from aotc.errors import RequestError
from aotc.runtime.kv_cache import BlockTable, PagePool, choose_cache, parse_bytes, plan_cache

PAGES, SIZE, MAX_PAGES = 12, 16, 6


class Pages(RuleBasedStateMachine):
    """Sequences that grow, end and share pages, against a plain count of owners."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES, SIZE)
        self.tables = []
        self.shared = []  # pages with an owner besides tables, once an owner

    def held(self):
        return [p for t in self.tables for p in t.ids[: t.count].tolist()] + self.shared

    @rule(tokens=st.integers(1, MAX_PAGES * SIZE))
    def begin(self, tokens):
        table, free = BlockTable(MAX_PAGES), self.pool.free_pages
        if self.pool.grow(table, tokens):
            assert table.count == -(-tokens // SIZE) and self.pool.free_pages == free - table.count
            self.tables.append(table)
        else:
            assert -(-tokens // SIZE) > free == self.pool.free_pages and table.count == 0, "something was taken"

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(0, 2 * SIZE))
    def grow(self, data, more):
        table = data.draw(st.sampled_from(self.tables))
        before = table.ids[: table.count].tolist()
        self.pool.grow(table, min(table.count * SIZE + more, MAX_PAGES * SIZE))
        assert table.ids[: len(before)].tolist() == before, "a page moved"

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.clear(table)
        assert table.count == 0

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from(self.held()))
        self.pool.share(page)
        self.shared.append(page)

    @precondition(lambda self: self.shared)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.shared.pop(data.draw(st.integers(0, len(self.shared) - 1))))

    @invariant()
    def counts_are_right(self):
        held = self.held()
        assert [self.pool.owners(p) for p in range(PAGES)] == [held.count(p) for p in range(PAGES)]
        assert self.pool.free_pages == PAGES - len(set(held)), "a page was lost"
        of_tables = [p for t in self.tables for p in t.ids[: t.count].tolist()]
        assert len(of_tables) == len(set(of_tables)), "a page with two owners"


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_free_page_is_neither_shared_nor_released_and_an_empty_pool_gives_none():
    pool = PagePool(1, SIZE)
    for use in (pool.share, pool.release):
        with pytest.raises(AssertionError, match="page 0 is free"):
            use(0)
    page = pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()
    pool.share(page)
    pool.release(page)
    assert pool.free_pages == 0
    pool.release(page)
    assert pool.free_pages == 1


STATIC, PAGED = KVCache("static", 1000, 100, ()), KVCache("paged", 160, 16, ())


@pytest.mark.parametrize(
    ("kind", "memory", "budget", "blocks", "seqs"),
    [
        (STATIC, None, None, 8, 8), (STATIC, 3999, None, 3, 3), (STATIC, 10**9, None, 8, 8),
        (PAGED, None, None, 56, 8), (PAGED, None, 1700, 10, 8), (PAGED, None, 5, 1, 8), (PAGED, None, 10**9, 56, 8),
        (PAGED, 1700, None, 10, 8), (PAGED, 160 * 99, 5, 99, 8),
    ],
)  # fmt: skip
def test_how_many_blocks(kind, memory, budget, blocks, seqs):
    """8 sequences of up to 100 tokens: 7 pages of 16 each."""
    plan = plan_cache(kind, 8, 100, memory, budget)
    assert (plan.blocks, plan.seqs, plan.nbytes) == (blocks, seqs, blocks * kind.block_bytes)
    assert (plan.max_pages, plan.page_size) == ((7, 16) if kind is PAGED else (0, 0))


@pytest.mark.parametrize(("kind", "what"), [(STATIC, "sequence: one takes 1000"), (PAGED, "page: one takes 160")])
def test_memory_that_holds_nothing_is_refused(kind, what):
    with pytest.raises(RequestError, match=f"^a KV cache of 99 bytes holds no {what}$"):
        plan_cache(kind, 8, 100, 99, None)


def test_the_layout_is_what_is_asked_for_or_usual_or_there():
    def manifest(*caches):
        return Manifest(2, Model("m", "llm", "f32"), (), (), 0, (), {}, kv_caches=caches)

    both = manifest(STATIC, PAGED)
    assert choose_cache(both, None) is STATIC and choose_cache(both, None, "paged") is PAGED
    assert choose_cache(both, "paged") is PAGED and choose_cache(manifest(PAGED), None) is PAGED
    with pytest.raises(RequestError, match=r"layout paged is not among those of the artifact \(static\): compile with"):
        choose_cache(manifest(STATIC), "paged")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), (4096, 4096), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("512MB", 512 * 10**6), ("3B", 3), (None, None)],
)
def test_sizes_of_memory(text, size):
    assert parse_bytes(text) == size


@given(st.sampled_from(["", "GiB", "-1", "2 gib", "1e9", "2GiBs", "0x10", "٣", "2  GiB", "1.GiB"]))
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RequestError, match="is no size of memory"):
        parse_bytes(text)
