"""One LLM and several threads: who steps the model, who gets what, and what becomes of the others when one fails."""

import asyncio
import math
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_llm import VOCAB, answer, engine_threads, fake_llm, until  # noqa: F401

from aotc.errors import DeadlineExceeded, DeviceLostError, RequestError
from aotc.runtime.llm import LLM
from aotc.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("both_ways")

SETTINGS = {"max_tokens": 6, "ignore_eos": True, "seed": 0}


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def asleep(llm, count):
    """Waits until so many threads wait for the one that steps the model."""
    until(lambda: len(llm._shared._waiting) == count)


def test_a_lone_caller_steps_the_model_itself(fake_llm):  # noqa: F811
    llm, device = fake_llm()
    assert llm.generate([1, 2], **SETTINGS).token_ids == answer([1, 2])
    assert [t for c in llm.stream([3], **SETTINGS) for t in c.token_ids] == list(answer([3]))
    assert set(device.threads) == {threading.get_ident()} and not engine_threads()


def test_calls_of_several_threads_share_steps(fake_llm, pool):  # noqa: F811
    llm, device = fake_llm(max_num_seqs=4)
    device.hold()
    first = pool.submit(llm.generate, [1], **SETTINGS)
    device.entered.wait()
    others = [pool.submit(llm.generate, [n], **SETTINGS) for n in (2, 3)]
    streamed = pool.submit(lambda: [t for c in llm.stream([4], **SETTINGS) for t in c.token_ids])
    asleep(llm, 3)
    device.go()
    assert first.result().token_ids == answer([1])
    assert [f.result().token_ids for f in others] == [answer([2]), answer([3])]
    assert tuple(streamed.result()) == answer([4])
    assert [len(step) for step in device.steps] == [1, 4, 4, 4, 4, 4, 3]


def test_who_is_done_hands_the_model_on(fake_llm, pool):  # noqa: F811
    llm, device = fake_llm(runs_ahead=False)
    device.hold()
    short = pool.submit(llm.generate, [1], **{**SETTINGS, "max_tokens": 2})
    device.entered.wait()
    long = pool.submit(llm.generate, [2], **SETTINGS)
    asleep(llm, 1)
    device.go()
    assert (short.result().token_ids, long.result().token_ids) == (answer([1], 2), answer([2]))
    assert [n for n, _ in enumerate(device.threads) if device.threads[n] != device.threads[0]] == [2, 3, 4, 5, 6]


def test_an_unread_stream_holds_up_nobody(fake_llm, pool):  # noqa: F811
    llm, device = fake_llm()
    stream = llm.stream([1], **SETTINGS)
    first = next(stream)
    assert pool.submit(llm.generate, [2], **SETTINGS).result(30).token_ids == answer([2])
    assert (*first.token_ids, *(t for c in stream for t in c.token_ids)) == answer([1])


def test_everything_at_once(fake_llm, pool):  # noqa: F811
    """Whole answers, streams, streams that are left and requests that are refused, from eight threads, on three slots."""
    llm, device = fake_llm()

    def work(worker):
        rng = random.Random(worker)
        for _ in range(25):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            settings = {**SETTINGS, "seed": rng.randrange(9), "max_tokens": rng.randrange(1, 12)}
            said = answer(prompt, settings["max_tokens"], settings["seed"])
            kind = rng.randrange(4)
            if kind == 0:
                assert llm.generate(prompt, **settings).token_ids == said
            elif kind == 1:
                assert tuple(t for c in llm.stream(prompt, **settings) for t in c.token_ids) == said
            elif kind == 2:
                stream = llm.stream(prompt, **settings)
                assert next(stream).token_ids == said[:1]
                stream.close()
            else:
                with pytest.raises(RequestError, match="outside 0"):
                    llm.generate([prompt, [VOCAB]], **settings)

    for future in [pool.submit(work, n) for n in range(8)]:
        future.result(60)


def test_a_closed_stream_frees_its_slot_at_once(fake_llm):  # noqa: F811
    llm, device = fake_llm(num_pages=30)
    stream = llm.stream([1], **SETTINGS)
    next(stream)
    assert llm.engine.scheduler.free_slots == 2
    stream.close()
    assert llm.engine.scheduler.free_slots == 3 and llm.engine.scheduler.pool.free_pages == 30
    next(llm.stream([2], **SETTINGS))  # collected, never closed
    assert llm.engine.scheduler.free_slots == 3


def test_a_stop_string_ends_the_request_before_the_next_step(fake_llm, byte_tokenizer):  # noqa: F811
    llm, device = fake_llm(runs_ahead=False)
    text = byte_tokenizer.decode(answer([1]))
    completion = llm.generate([1], **SETTINGS, stop=text[2])
    assert (completion.text, completion.finish_reason, len(device.steps)) == (text[:2], "stop", 3)


def test_lists_of_params_and_seeds(fake_llm):  # noqa: F811
    llm, device = fake_llm()
    asked = {"max_tokens": 6, "ignore_eos": True}
    got = llm.generate([[1], [1], [2]], seed=[3, 4, 3], **asked)
    assert [c.token_ids for c in got] == [answer([1], 6, 3), answer([1], 6, 4), answer([2], 6, 3)]
    params = [SamplingParams(**asked, seed=1), SamplingParams(max_tokens=2, ignore_eos=True)]
    got = llm.generate([[1], [2]], params)
    assert got[0].token_ids == answer([1], 6, 1) and len(got[1].token_ids) == 2
    assert [c.token_ids for c in llm.generate([[1], [2]], params, seed=[5, 6])] == [answer([1], 6, 5), answer([2], 2, 6)]
    assert llm.generate([], seed=[]) == []
    assert llm.generate("AB", seed=1, **asked).token_ids == llm.generate(["AB"], seed=[1], **asked)[0].token_ids
    for prompt, given, message in (
        ([[1], [2]], {"seed": [1]}, r"^seed has 1 entries for 2 prompts: give one for each$"),
        ([[1]], {"params": params}, r"^params has 2 entries for 1 prompts: give one for each$"),
        ([1], {"n": 2}, "^n is 2: for several answers, give the prompt several times with a seed each$"),
        (7, {}, "^a prompt is text or token ids, got int$"),
        ([[1.5]], {}, "^a prompt is text or token ids, got list$"),
        ([1], {"deadline_ms": 0}, "^deadline_ms is 0: give milliseconds from now, above 0$"),
        ([1] * 100, {}, "^the prompt has 100 tokens; the model was compiled for 100 with its answer: "
                        "shorten it, or compile with a larger --max-model-len$"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, **given)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "5"])
def test_a_deadline_that_is_no_length_of_time(fake_llm, wrong):  # noqa: F811
    """However it is given; nothing is computed, and a conversation stays as it was."""
    llm, device = fake_llm()
    session = llm.session()
    session.replace([1, 2])

    async def ask(made):
        return await made.agenerate([1], deadline_ms=wrong, **SETTINGS)

    async def stream(made):
        async with made.astream([1], deadline_ms=wrong, **SETTINGS) as chunks:
            return [c async for c in chunks]

    for made in (llm, session):
        for call in (
            lambda made=made: made.generate([1], deadline_ms=wrong, **SETTINGS),
            lambda made=made: list(made.stream([1], deadline_ms=wrong, **SETTINGS)),
            lambda made=made: asyncio.run(ask(made)),
            lambda made=made: asyncio.run(stream(made)),
        ):
            with pytest.raises(RequestError, match="^deadline_ms is (nan|inf|a str): give milliseconds from now, above 0$"):
                call()
    assert session.token_ids == (1, 2) and not device.steps
    session.close()


@pytest.fixture
def late(monkeypatch):
    """late(device, milliseconds): what each of its steps takes."""
    now = [0.0]
    monkeypatch.setattr(LLM, "_clock", staticmethod(lambda: now[0]))

    def take(device, milliseconds):
        def before(rows):
            now[0] += milliseconds / 1000

        device.before = before

    return take


def test_a_missed_deadline_gives_what_there_is(fake_llm, late, byte_tokenizer):  # noqa: F811
    llm, device = fake_llm(runs_ahead=False)
    late(device, 10)
    with pytest.raises(DeadlineExceeded, match=r"^the answer was not whole after \d+ ms: give it more time, or ask for f") as e:
        llm.generate([1], **SETTINGS, deadline_ms=35)
    assert e.value.token_ids == answer([1], 4) and e.value.text == byte_tokenizer.decode(answer([1], 4))
    assert llm.generate([1], **SETTINGS, deadline_ms=65).token_ids == answer([1])
    stream, got = llm.stream([1], **SETTINGS, deadline_ms=25), []
    with pytest.raises(DeadlineExceeded) as e:
        for chunk in stream:
            got += chunk.token_ids
    assert e.value.token_ids == tuple(got) == answer([1], 3)


def test_a_deadline_of_a_list_is_for_all_of_it(fake_llm, late):  # noqa: F811
    llm, device = fake_llm(runs_ahead=False)
    late(device, 10)
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True, seed=0) for n in (2, 6, 5, 2)]  # on three slots
    with pytest.raises(DeadlineExceeded) as e:
        llm.generate([[1], [2], [3], [4]], lengths, deadline_ms=35)
    assert [c.finish_reason for c in e.value.completions] == ["length", "deadline", "deadline", "length"]
    assert [len(c.token_ids) for c in e.value.completions] == [2, 4, 4, 2]
    assert e.value.token_ids == answer([2], 4)


def test_close_ends_the_calls_that_run(fake_llm, pool):  # noqa: F811
    llm, device = fake_llm()
    device.hold()
    calls = [pool.submit(llm.generate, [1], **SETTINGS)]
    device.entered.wait()
    calls += [pool.submit(llm.generate, [2], **SETTINGS), pool.submit(list, llm.stream([3], **SETTINGS))]
    asleep(llm, 2)
    closing = [pool.submit(llm.close) for _ in range(2)]
    for call in calls[1:]:  # at once
        with pytest.raises(RequestError, match="^the model was closed while it answered$"):
            call.result(30)
    assert not device.closed and not any(c.done() for c in closing)
    device.go()
    with pytest.raises(RequestError, match="^the model was closed while it answered$"):
        calls[0].result(30)
    for closed in closing:
        closed.result(30)
    for ask in (lambda: llm.generate([1]), lambda: list(llm.stream([1])), lambda: llm.generate([[1], [2]])):
        with pytest.raises(RequestError, match="^the model was closed: load it again$"):
            ask()
    llm.close()
    assert device.closed == 1


def test_a_lost_device_ends_all_calls(fake_llm, pool):  # noqa: F811
    llm, device = fake_llm()

    def fail(rows):
        raise DeviceLostError("step 3 failed in program decode_1")

    device.before = fail
    device.hold()
    calls = [pool.submit(llm.generate, [1], **SETTINGS)]
    device.entered.wait()
    calls.append(pool.submit(llm.generate, [2], **SETTINGS))
    asleep(llm, 1)
    device.go()
    errors = [c.exception(30) for c in calls]
    assert [str(e) for e in errors] == ["step 3 failed in program decode_1"] * 2
    assert {type(e) for e in errors} == {DeviceLostError} and errors[0] is not errors[1]


def test_a_refused_request_fails_alone(fake_llm):  # noqa: F811
    llm, device = fake_llm(poisoned=frozenset(["r2"]))
    with pytest.raises(RequestError, match="outside 0..49"):
        llm.generate([[1], [VOCAB]], **SETTINGS)
    assert not llm._shared._calls and llm.engine.scheduler.free_slots == 3
    llm, device = fake_llm(poisoned=frozenset(["r2"]))
    with pytest.raises(RequestError, match="the model gave no valid token"):
        llm.generate([[1], [2]], **SETTINGS)
    assert llm.generate([2], **SETTINGS).token_ids == answer([2])


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_ends_the_call_that_it_hits_alone(fake_llm, pool, at):  # noqa: F811
    """Ctrl-C, or whatever a signal handler raises, in the middle of a step of the main thread."""
    llm, device = fake_llm(num_pages=50)
    left = [at]

    def interrupt(rows):
        if len(rows) == 3:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

    device.hold()
    main = pool.submit(llm.generate, [1], **{**SETTINGS, "max_tokens": 20})
    device.entered.wait()
    device.before = interrupt
    whole = pool.submit(llm.generate, [2], **SETTINGS)
    streamed = pool.submit(lambda: [t for c in llm.stream([3, 4, 5], **SETTINGS) for t in c.token_ids])
    asleep(llm, 2)
    device.go()
    with pytest.raises(KeyboardInterrupt):
        main.result(30)
    assert whole.result(30).token_ids == answer([2]) and tuple(streamed.result(30)) == answer([3, 4, 5])


def test_a_forked_process_is_told_so(fake_llm):  # noqa: F811
    llm, device = fake_llm()
    stream = llm.stream([1], **SETTINGS)
    next(stream)
    llm._shared._lock.acquire()  # as another thread may have, in the moment of the fork
    child = os.fork()
    if not child:
        code = 1
        try:
            for ask in (lambda: llm.generate([1]), lambda: next(stream), lambda: asyncio.run(llm.agenerate([1]))):
                with pytest.raises(RequestError, match="loaded before this process was forked off: load it again here"):
                    ask()
            stream.close()
            llm.close()
            code = int(bool(device.closed))
        finally:
            os._exit(code)
    llm._shared._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert (*answer([1])[:1], *(t for c in stream for t in c.token_ids)) == answer([1])
