"""Calls of an LLM that go before others, and calls whose cache is their tenant's: however they are made."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_llm import answer, fake_llm, until  # noqa: F401

from aotc.errors import RequestError

pytestmark = pytest.mark.usefixtures("both_ways")

SETTINGS = {"max_tokens": 2, "ignore_eos": True, "seed": 0}
PROMPT = list(range(10, 31))


def generate(llm, prompt, **asked):
    return llm.generate(prompt, **asked).token_ids


def stream(llm, prompt, **asked):
    return tuple(t for chunk in llm.stream(prompt, **asked) for t in chunk.token_ids)


def agenerate(llm, prompt, **asked):
    async def ask():
        return (await llm.agenerate(prompt, **asked)).token_ids

    return asyncio.run(ask())


def astream(llm, prompt, **asked):
    async def ask():
        async with llm.astream(prompt, **asked) as chunks:
            return tuple([t async for chunk in chunks for t in chunk.token_ids])

    return asyncio.run(ask())


def converse(llm, prompt, priority=0, cache_salt="", **asked):
    with llm.session(priority=priority, cache_salt=cache_salt) as session:
        return session.generate(prompt, **asked).token_ids


def prefilled(llm, prompt, priority=0, cache_salt="", **asked):
    with llm.session(priority=priority, cache_salt=cache_salt) as session:
        session.prefill(prompt)
        return stream(session, [], **asked)


ways = pytest.mark.parametrize("ask", [generate, stream, agenerate, astream, converse, prefilled])


@ways
def test_tenants_share_no_prefix(fake_llm, ask):  # noqa: F811
    llm, device = fake_llm(num_pages=60, max_num_batched_tokens=40)

    def computed(salt):
        assert ask(llm, PROMPT, cache_salt=salt, **SETTINGS) == answer(PROMPT, 2)
        first = device.steps[0][0][1]
        device.steps.clear()
        return first

    assert [computed(salt) for salt in ("", "a", "b", "a", "", "b")] == [21, 21, 21, 1, 1, 1]


@pytest.mark.parametrize("ask", [generate, stream, agenerate, astream, converse])
@pytest.mark.parametrize("pages", [0, 60])
def test_a_lower_priority_goes_first(fake_llm, ask, pages):  # noqa: F811
    """While one runs, three come for its slot: in which order, only their priorities say."""
    llm, device = fake_llm(max_num_seqs=1, num_pages=pages)
    with ThreadPoolExecutor(4) as pool:
        device.hold()
        asked = [pool.submit(llm.generate, [1], **SETTINGS)]
        device.entered.wait()
        for priority in (1, 0, -1):
            asked.append(pool.submit(ask, llm, [2 - priority], priority=priority, **SETTINGS))
            until(lambda: len(llm._shared._calls) == len(asked))
        device.go()
        for future in asked:
            future.result(30)
    names = [name for step in device.steps for name, _, samples in step if samples]
    assert list(dict.fromkeys(names)) == sorted(set(names), key=lambda name: (name != names[0], -int(name[1:])))


@ways
def test_what_is_neither_a_priority_nor_a_salt(fake_llm, ask):  # noqa: F811
    llm, device = fake_llm()
    for priority in (float("nan"), 0.5, "1", None, 2**31, -(2**31) - 1):
        with pytest.raises(RequestError, match="^priority must be an integer of 32 bits: a lower one goes first"):
            ask(llm, [1], priority=priority, **SETTINGS)
    for salt in (None, 7, b"x", []):
        with pytest.raises(RequestError, match="^cache_salt must be a text, got "):
            ask(llm, [1], cache_salt=salt, **SETTINGS)
    assert not device.steps and not llm._shared._calls
