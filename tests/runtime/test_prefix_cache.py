"""Full pages are shared among requests that begin alike: how many, whose, for how long, and what is counted."""

import hashlib

import pytest
from fake_executor import COMPUTE, all_free, expected, make, request, run, tokens

from aotc.runtime.kv_cache import BlockTable, PagePool
from aotc.runtime.prefix_cache import PrefixCache, extend_digests

pytestmark = pytest.mark.usefixtures("both_ways")

PROMPT = list(range(10, 20))  # two full pages of 4 and a half


def ask(engine, name, prompt, **fields):
    engine.submit(request(name, prompt, **fields))
    return run(engine)[name]


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        (PROMPT, 8), (PROMPT[:9], 8), (PROMPT[:8], 4), (PROMPT[:7], 4), (PROMPT[:4], 0), (PROMPT[:5], 4),
        (PROMPT[:5] + PROMPT[:5], 4), (PROMPT + [1] * 9, 8), (PROMPT[1:], 0), (PROMPT[4:], 0),
    ],
)  # fmt: skip
def test_the_longest_known_prefix_is_shared_but_never_the_last_token(second, cached):
    engine, executor = make(num_pages=20)
    assert {o.cached_tokens for o in ask(engine, "a", PROMPT, max_tokens=2)} == {0}
    executor.steps.clear()
    out = ask(engine, "b", second)
    assert {o.cached_tokens for o in out} == {cached}
    assert [o.token_id for o in out] == expected(second, 6)
    computed = sum(count for step in executor.steps for _, count, _ in step)
    assert computed == len(second) - cached + 5, "the rest of the prompt, and each token but the last"
    assert (engine.prefixes.queries, engine.prefixes.hits) == (10 + len(second), cached)
    assert all_free(engine, executor)


def test_answers_are_known_too():
    """The next turn of a conversation begins with the last answer."""
    engine, _ = make(num_pages=20)
    answer = [o.token_id for o in ask(engine, "a", PROMPT, max_tokens=7)]
    assert ask(engine, "b", PROMPT + answer + [1])[0].cached_tokens == 16, "all 17 but the last were computed"


def test_while_the_first_one_still_runs():
    engine, executor = make(runs_ahead=False, num_pages=20, max_num_batched_tokens=40)
    engine.submit(request("a", PROMPT, max_tokens=8))
    engine.step()
    engine.submit(request("b", PROMPT, max_tokens=8))
    engine.step()
    first, second = engine.scheduler.running
    assert first.pages.ids[:3].tolist()[:2] == second.pages.ids[:2].tolist() and first.pages.ids[2] != second.pages.ids[2]
    assert [engine.scheduler.pool.owners(p) for p in first.pages.ids[:3]] == [2, 2, 1]
    assert engine.cancel("a")
    assert tokens(run(engine), "b") == expected(PROMPT, 8)[1:]
    assert all_free(engine, executor)


def test_a_chunk_in_the_middle_of_a_page_makes_only_full_pages_known():
    engine, _ = make(runs_ahead=False, num_pages=20, max_num_batched_tokens=6)
    engine.submit(request("a", PROMPT * 2))
    engine.step()
    assert engine.cancel("a")
    assert ask(engine, "b", PROMPT * 2)[0].cached_tokens == 4


def test_tenants_share_nothing():
    engine, _ = make(num_pages=30)
    for salt, cached in (("", 0), ("x", 0), ("y", 0), ("x", 8), ("", 8)):
        assert ask(engine, "a", PROMPT, salt=salt)[0].cached_tokens == cached


def test_it_can_be_turned_off_and_static_caches_have_none():
    for engine, _ in (make(num_pages=20, options={"prefix_cache": False}), make()):
        for _ in range(2):
            assert ask(engine, "a", PROMPT)[0].cached_tokens == 0
        assert engine.prefixes is None


@pytest.mark.parametrize(("number", "cached"), [(1, 12), (2, 4), (3, 12)])
def test_what_was_not_used_for_longest_is_forgotten_first_and_from_its_end(number, cached):
    engine, _ = make(num_pages=8)
    for n in (1, 2, 1):  # 3 full pages each; those of 1 are younger
        ask(engine, "x", [n] * 13, max_tokens=1)
    ask(engine, "x", [3] * 16, max_tokens=1)  # 4 pages: 2 that nobody knows, and the last two of 2
    assert ask(engine, "x", [number] * 13, max_tokens=1)[0].cached_tokens == cached


def test_a_request_waits_for_pages_that_others_run_on_but_not_for_those_that_are_known_only():
    engine, executor = make(runs_ahead=False, num_pages=4, max_num_batched_tokens=40)
    ask(engine, "x", [1] * 15, max_tokens=1)
    engine.submit(request("a", [1] * 15, max_tokens=1))
    engine.submit(request("b", [2], max_tokens=1))
    assert [o.request_id for o in engine.step()] == ["a"], "all 4 pages: 3 of them known before"
    assert [o.request_id for o in engine.step()] == ["b"]
    assert all_free(engine, executor)


def test_a_preempted_sequence_finds_its_own_pages_and_is_counted_once():
    engine, executor = make(num_pages=6, max_num_seqs=2, max_num_batched_tokens=40, options={"costs": COMPUTE})
    engine.submit(request("old", [1] * 9, max_tokens=8))
    engine.submit(request("young", [2] * 9, max_tokens=8))
    out = run(engine)
    assert engine.scheduler.preemptions == 1
    assert (engine.prefixes.queries, engine.prefixes.hits) == (18, 0)
    assert {o.cached_tokens for o in out["young"]} == {0}
    assert tokens(out, "old") == expected([1] * 9, 8) and tokens(out, "young") == expected([2] * 9, 8)
    again = [count for step in executor.steps for name, count, _ in step if name == "young" and count > 1]
    assert again[0] == 9 and again[1] < 9, "a part was still known"


def test_pages_of_a_request_that_gave_no_valid_token_are_shared_no_more():
    engine, executor = make(num_pages=20, poisoned=frozenset(["bad"]))
    ask(engine, "good", PROMPT[:5], max_tokens=1)
    assert ask(engine, "bad", PROMPT)[0].cached_tokens == 4
    assert ask(engine, "good", PROMPT)[0].cached_tokens == 0
    assert ask(engine, "good", PROMPT)[0].cached_tokens == 8
    assert all_free(engine, executor)


def test_a_name_is_a_chained_sha256_of_salt_and_token_ids():
    digests = []
    extend_digests(digests, [1, 2, 3, 4, 5], 2, 1, "t")
    extend_digests(digests, [1, 2, 3, 4, 5], 2, 2, "t")
    first = hashlib.sha256(hashlib.sha256(b"t").digest() + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    assert digests == [first, hashlib.sha256(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()]
    with pytest.raises(AssertionError, match="no full page"):
        extend_digests(digests, [1, 2, 3, 4, 5], 2, 3, "t")


def test_of_two_pages_with_one_name_the_first_stays_known():
    pool = PagePool(4, 4, PrefixCache())
    one, other = BlockTable(4), BlockTable(4)
    assert pool.grow(one, 4) and pool.grow(other, 4)
    for table in (one, other):
        pool.prefixes.publish(int(table.ids[0]), b"name")
    assert pool.prefixes.find([b"name", b"more"]) == [one.ids[0]]
    pool.clear(one)
    pool.clear(other)
    assert list(pool.prefixes.idle) == [one.ids[0]] and pool.free_pages == 4
    with pytest.raises(IndexError):
        [pool.allocate() for _ in range(5)]
    assert pool.prefixes.find([b"name"]) == []
