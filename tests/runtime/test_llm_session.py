"""Sessions: what was computed once is not computed again, and never is the text another one for it."""

import asyncio
import gc
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from fake_executor import COMPUTE, COPY, VOCAB, all_free, expected, make, request, run
from fake_llm import answer, engine_threads, fake_llm, until  # noqa: F401

from aotc.errors import DeadlineExceeded, RequestError
from aotc.runtime.sequence import SessionKey
from aotc.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("both_ways")

SETTINGS = {"max_tokens": 6, "ignore_eos": True, "seed": 0}
PROMPT = list(range(10, 23))
SESSIONS = [SessionKey(salt, f"s{n}") for salt in ("", "a") for n in range(3)]


@pytest.fixture(params=["static", "paged"])
def chat(fake_llm, request):  # noqa: F811
    """(an LLM over static slots or pages of 4 tokens, its device, a session)."""
    llm, device = fake_llm(**({"num_pages": 60} if request.param == "paged" else {}), max_num_batched_tokens=20)
    with llm.session() as session:
        yield llm, device, session


def computed(device):
    """Tokens that each step computed since this was asked last."""
    counts = [sum(count for _, count, _ in step) for step in device.steps]
    device.steps.clear()
    return counts


def test_a_turn_computes_what_is_new(chat):
    llm, device, session = chat
    session.prefill(PROMPT)
    assert computed(device) == [13]
    said = session.generate([23, 24], **SETTINGS)
    assert said.token_ids == answer([*PROMPT, 23, 24]) and computed(device) == [2, 1, 1, 1, 1, 1]
    assert session.token_ids == (*PROMPT, 23, 24, *said.token_ids)
    before = session.token_ids
    assert [t for c in session.stream([25], **SETTINGS) for t in c.token_ids] == list(answer([*before, 25]))
    assert computed(device) == [2, 1, 1, 1, 1, 1]  # the last token of an answer was only ever sampled
    session.prefill()
    session.prefill([30, 31, 32])
    assert computed(device) == [1, 3]
    more = session.generate(**SETTINGS)
    assert more.token_ids == answer([*before, 25, *answer([*before, 25]), 30, 31, 32])
    assert computed(device)[0] <= 4  # a page that is full is known to others: it is computed again, not written
    assert llm.engine.scheduler.free_slots == 3


@pytest.mark.parametrize("kept", range(0, 16))
def test_an_edit_computes_from_where_it_parts(chat, kept):
    llm, device, session = chat
    session.prefill(PROMPT)
    computed(device)
    new = [*PROMPT[:kept], 40, 41, 42] if kept < 13 else PROMPT[: kept - 5]
    common = min(kept, 13) if kept < 13 else len(new) - 1
    session.replace(new)
    assert session.generate(**SETTINGS).token_ids == answer(new) and session.token_ids[: len(new)] == tuple(new)
    first = computed(device)[0]
    paged = llm.engine.scheduler.pool is not None
    assert first == len(new) - (common // 4 * 4 if paged and common < 12 else common)


def test_where_a_text_is_cut_does_not_matter(fake_llm, tmp_path):  # noqa: F811
    """AB is a token, so are A and B: a text that is given in two pieces has the tokens of the whole one."""
    llm, device = fake_llm()
    vocab = {c: n for n, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvw")} | {"AB": 49}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("A", "B")]))
    made.post_processor = tokenizers.processors.TemplateProcessing("Z $A", special_tokens=[("Z", 25)])
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    llm._tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    with llm.session() as session:
        session.prefill("CA")
        assert session.token_ids == (25, 2, 0)
        device.steps.clear()
        assert session.generate("BD", **SETTINGS).token_ids == answer([25, 2, 49, 3])
        assert device.steps[0][0][1] == 2  # after Z and C
        session.prefill("A")
        session.prefill("B")
        assert session.token_ids == (25, 2, 49, 3, *answer([25, 2, 49, 3]), 49)
        assert session.text == "ZCABD" + llm.tokenizer.decode(answer([25, 2, 49, 3])) + "AB"
        session.prefill([7])
        session.prefill("A")
        assert session.token_ids[-3:] == (49, 7, 0)


def test_more_sessions_than_slots(chat):
    """And plain calls between them: nothing waits for a session that is idle."""
    llm, device, session = chat
    sessions, said = [llm.session() for _ in range(7)], [[] for _ in range(7)]
    rng = random.Random(5)
    for _ in range(60):
        n = rng.randrange(7)
        new = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))]
        if len(said[n]) > 60:
            sessions[n].replace([])
            said[n] = []
        said[n] += new
        if rng.randrange(3) == 0:
            sessions[n].prefill(new)
            continue
        got = sessions[n].generate(new, **SETTINGS)
        assert got.token_ids == answer(said[n])
        said[n] += got.token_ids
        assert sessions[n].token_ids == tuple(said[n])
        assert [c.token_ids for c in llm.generate([[n], [n, 1], [2], [3]], **SETTINGS)][0] == answer([n])
    for one in sessions:
        one.close()
    assert all_free(llm.engine, device)


def test_what_a_session_holds_is_freed(chat):
    llm, device, session = chat
    scheduler = llm.engine.scheduler

    def held():
        return len(scheduler.kept), len(scheduler._free), scheduler.pool and 60 - scheduler.pool.free_pages

    assert held()[0] == 0
    session.prefill(PROMPT)
    assert held() == ((1, 3, 4) if scheduler.pool else (1, 2, None))
    session.close()
    assert held()[:2] == (0, 3) and all_free(llm.engine, device)
    session.close()
    for ask in (session.prefill, session.generate, lambda: list(session.stream([1])), lambda: session.replace([1])):
        with pytest.raises(RequestError, match="^the session was closed: make another one$"):
            ask()
    dropped = llm.session()
    dropped.prefill(PROMPT)
    del dropped
    gc.collect()
    assert held()[:2] == (0, 3)


def test_an_answer_counts_as_far_as_it_was_given(chat, byte_tokenizer, monkeypatch):
    llm, device, session = chat
    said = answer(PROMPT)
    text = byte_tokenizer.decode(said)
    stream = session.stream(PROMPT, **SETTINGS)
    assert next(stream).token_ids + next(stream).token_ids == said[:2]
    with pytest.raises(RequestError, match="^the session is answering: end that stream first, or make another session$"):
        session.prefill([1])
    stream.close()
    assert session.token_ids == (*PROMPT, *said[:2])
    stream = session.stream([1], **SETTINGS)
    stream.close()  # before it began
    assert session.token_ids == (*PROMPT, *said[:2])

    session.replace(PROMPT)
    assert session.generate(**SETTINGS, stop=text[2:4]).text == text[:2]
    assert session.token_ids == (*PROMPT, *said[:2])
    assert session.generate([1], **SETTINGS).token_ids == answer([*PROMPT, *said[:2], 1])

    session.replace(PROMPT)
    now = [0.0]
    monkeypatch.setattr(llm, "_clock", lambda: now[0])
    monkeypatch.setattr(llm.engine, "_clock", lambda: now[0])

    def slow(rows):
        now[0] += 0.01

    device.before = slow
    with pytest.raises(DeadlineExceeded) as late:
        session.generate(**SETTINGS, deadline_ms=25)
    given = late.value.token_ids
    assert given == said[: len(given)] and len(given) in (2, 3) and session.token_ids == (*PROMPT, *given)


def test_a_call_that_fails_leaves_the_conversation(chat):
    llm, device, session = chat
    session.prefill(PROMPT)
    for bad in ([VOCAB], [1] * 100, [-1]):
        for ask in (session.prefill, session.generate, lambda ids: list(session.stream(ids))):
            with pytest.raises(RequestError):
                ask(bad)
            assert session.token_ids == tuple(PROMPT)
    with pytest.raises(RequestError, match="no tokens"):
        llm.session().generate()
    assert session.generate([1], **SETTINGS).token_ids == answer([*PROMPT, 1])


def test_a_turn_takes_over_from_a_prefill(chat):
    """The speaker is done while the last words are still being computed: what was computed of them is kept."""
    llm, device, session = chat
    long = [n % 9 for n in range(50)]  # three steps of 20
    with ThreadPoolExecutor(2) as pool:
        device.hold_after(2)
        ahead = pool.submit(session.prefill, long)
        until(lambda: len(device.steps) == 2)
        turn = pool.submit(session.generate, [1], **SETTINGS)
        until(lambda: session._turn is not None and len(llm._shared._waiting) == 1)
        device.go()
        assert turn.result(30).token_ids == answer([*long, 1])
        assert ahead.result(30) is None
    assert computed(device)[:3] == [20, 20, 10] and sum(computed(device)) == 0


def test_under_asyncio(chat):
    llm, device, session = chat

    async def main():
        await session.aprefill(PROMPT)
        async with session.astream([1], **SETTINGS) as stream:
            first = await anext(stream)
        given = [*PROMPT, 1, *first.token_ids]
        assert session.token_ids == tuple(given)  # what came after it was never read
        ahead = asyncio.create_task(session.aprefill([2, 3]))
        await asyncio.sleep(0)
        whole = await session.agenerate([4], **SETTINGS)
        assert await ahead is None
        assert whole.token_ids == answer([*given, 2, 3, 4])
        others = [llm.session() for _ in range(5)]
        got = await asyncio.gather(*(s.agenerate([n], **SETTINGS) for n, s in enumerate(others)))
        assert [g.token_ids for g in got] == [answer([n]) for n in range(5)]
        for other in others:
            other.close()
        with pytest.raises(RequestError):
            await session.aprefill([VOCAB])
        assert session.token_ids == (*given, 2, 3, 4, *whole.token_ids)

    asyncio.run(main())


def test_close_ends_the_turn(chat):
    llm, device, session = chat
    with ThreadPoolExecutor(1) as pool:
        device.hold()
        turn = pool.submit(session.generate, PROMPT, **SETTINGS)
        device.entered.wait()
        session.close()
        device.go()
        with pytest.raises(RequestError, match="^the session was closed: make another one$"):
            turn.result(30)
    assert all_free(llm.engine, device) and not engine_threads()


@pytest.mark.parametrize("options", [{}, {"num_pages": 40}, {"num_pages": 40, "options": {"prefix_cache": False}}])
def test_tenants_whose_sessions_are_named_alike_share_nothing(options):
    engine, device = make(**options)

    def turn(name, prompt, salt):
        engine.submit(request(name, prompt, salt=salt, session="s"))
        out = run(engine)[name]
        assert [o.token_id for o in out] == expected(prompt, 6)
        return out[0].cached_tokens

    assert [turn(f"{salt}1", PROMPT, salt) for salt in ("", "a", "b")] == [0, 0, 0]
    assert len(engine.scheduler.kept) == 3
    engine.forget(SessionKey("a", "s"))
    again = [turn(f"{salt}2", [*PROMPT, *expected(PROMPT, 6), 1], salt) for salt in ("", "a", "b")]
    assert again == [18, 16 if engine.prefixes is not None else 0, 18]  # what is forgotten is its tenant's prefix yet
    for salt in ("", "a", "b"):
        engine.forget(SessionKey(salt, "s"))
    assert all_free(engine, device)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"num_pages": 26}, {"num_pages": 14, "offload_memory": 1 << 20}])
def test_sessions_in_an_engine_that_is_full(seed, options):
    """Turns of six sessions, of two tenants, and plain requests at once, with edits, cancels, deadlines and too few pages."""
    costs = COPY if seed % 2 else COMPUTE
    engine, device = make(options={"costs": costs}, max_model_len=50, **options)
    rng, history, running, checked, kept = random.Random(seed), {}, {}, 0, 0
    for number in range(150):
        session = rng.choice(SESSIONS) if rng.randrange(4) else SessionKey(rng.choice(["", "a"]), "")
        if session not in [r.session_key for r, _ in running.values()] and len(running) < 8:
            old = history.get(session, [])[: rng.choice([0, 3, 4, 9, 99])] if rng.randrange(3) == 0 else history.get(session, [])
            prompt = [*old[:35], *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6)))]
            turn = {"priority": rng.randrange(2), "salt": session.salt, "session": session.name}
            asked = request(f"r{number}", prompt, max_tokens=rng.randrange(1, 9), **turn)
            engine.submit(asked)
            running[asked.request_id] = asked, []
        if running and rng.randrange(8) == 0:
            name = rng.choice(list(running))
            engine.cancel(name)
            asked, got = running.pop(name)
            history[asked.session_key] = [*asked.prompt_token_ids, *got]
        if rng.randrange(20) == 0:
            engine.forget(rng.choice(SESSIONS))
        kept = max(kept, len(engine.scheduler.kept))
        for _ in range(rng.randrange(4)):
            for output in engine.step():
                asked, got = running[output.request_id]
                got.append(output.token_id)
                if output.finish_reason:
                    assert got == expected(asked.prompt_token_ids, len(got))
                    history[asked.session_key] = [*asked.prompt_token_ids, *got]
                    checked += 1
                    del running[output.request_id]
    while engine.has_work:
        engine.step()
    assert checked > 40 and kept
    for session in SESSIONS:
        engine.forget(session)
    assert all_free(engine, device)
