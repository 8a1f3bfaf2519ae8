"""An LLM under asyncio: the loop never waits for the model, and who leaves cancels."""

import asyncio
import contextlib
import gc
import threading

import pytest
from fake_llm import answer, engine_threads, fake_llm, until  # noqa: F401

from aotc.errors import DeadlineExceeded, DeviceLostError, RequestError
from aotc.runtime import shared_engine
from aotc.runtime.llm import LLM

pytestmark = pytest.mark.usefixtures("both_ways")

SETTINGS = {"max_tokens": 6, "ignore_eos": True, "seed": 0}


async def ids(stream):
    return tuple([t async for chunk in stream for t in chunk.token_ids])


async def true(condition):
    """Waits for what another thread does, and lets other tasks run."""
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")


def test_streams_and_whole_answers(fake_llm):  # noqa: F811
    llm, device = fake_llm(num_pages=40)

    async def main():
        async with llm.astream([1], **SETTINGS) as stream:
            assert await ids(stream) == answer([1])
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert await ids(llm.astream([2], **SETTINGS)) == answer([2])
        whole = await llm.agenerate([3], **SETTINGS)
        assert (whole.token_ids, whole.finish_reason) == (answer([3]), "length")

    asyncio.run(main())
    assert threading.get_ident() not in device.threads and len(set(device.threads)) == 1


def test_the_loop_goes_on_while_a_step_runs(fake_llm):  # noqa: F811
    """A step that ends only once the loop has turned a hundred times: were the loop to wait for it, it would never end."""
    llm, device = fake_llm()
    turns = []

    async def turn():
        for n in range(100):
            turns.append(n)
            await asyncio.sleep(0)
        device.go()

    async def main():
        device.hold()
        device.hold_after(2)
        async with llm.astream([1], **SETTINGS) as stream:
            await true(device.entered.is_set)
            turning = asyncio.create_task(turn())
            first = await anext(stream)
            assert len(turns) == 100 and first.token_ids == answer([1], 1)
            await turning
            turns.clear()
            await true(lambda: len(device.steps) == 2 and device.entered.is_set())
            left = asyncio.create_task(turn())
        await left  # leaving the block did not wait either
        assert len(turns) == 100

    asyncio.run(main())


@pytest.mark.parametrize("how", ["block", "aclose", "task", "collected", "error"])
def test_who_leaves_cancels_within_a_step(fake_llm, how):  # noqa: F811
    llm, device = fake_llm(num_pages=100, max_model_len=390)
    settings = {**SETTINGS, "max_tokens": 300}

    async def read(stream):
        async with stream:
            async for _ in stream:
                if len(device.steps) == 3 and how == "error":
                    raise ValueError("the caller's own")

    async def main():
        device.hold_after(3)
        stream = llm.astream([1], **settings)
        if how in ("task", "error"):
            task = asyncio.create_task(read(stream))
            await true(lambda: len(device.steps) == 3)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, ValueError)):
                await task
        else:
            async with stream if how == "block" else contextlib.nullcontext():
                await anext(stream)
                await true(lambda: len(device.steps) == 3)
        if how == "aclose":
            await stream.aclose()
        del stream
        gc.collect()
        device.go()
        await true(lambda: llm.engine.scheduler.free_slots == 3)
        assert len(device.steps) <= 4 and llm.engine.scheduler.pool.free_pages == 100

    asyncio.run(main())


def test_an_unread_stream_holds_up_nobody(fake_llm):  # noqa: F811
    llm, device = fake_llm()

    async def main():
        async with llm.astream([1], **SETTINGS) as unread, llm.astream([2], **SETTINGS) as late:
            assert await asyncio.gather(*(ids(llm.astream([n], **SETTINGS)) for n in range(3, 10))) == [
                answer([n]) for n in range(3, 10)
            ]
            assert await ids(late) == answer([2])
            assert await ids(unread) == answer([1])

    asyncio.run(main())


def test_tasks_share_steps_with_each_other_and_with_threads(fake_llm):  # noqa: F811
    llm, device = fake_llm(max_num_seqs=4)

    async def main():
        device.hold()
        thread = asyncio.create_task(asyncio.to_thread(llm.generate, [1], **SETTINGS))
        await true(device.entered.is_set)
        tasks = [asyncio.create_task(llm.agenerate([n], **SETTINGS)) for n in (2, 3, 4)]
        await true(lambda: len(llm._shared._calls) == 4 and len(llm._shared._waiting) == 1)
        device.go()
        got = [(await t).token_ids for t in (thread, *tasks)]
        assert got == [answer([n]) for n in (1, 2, 3, 4)]

    asyncio.run(main())
    assert [len(step) for step in device.steps] == [1, 4, 4, 4, 4, 4, 3]


def test_errors_reach_the_task(fake_llm, monkeypatch):  # noqa: F811
    now = [0.0]
    monkeypatch.setattr(LLM, "_clock", staticmethod(lambda: now[0]))
    llm, device = fake_llm(runs_ahead=False)

    def slow(rows):
        now[0] += 0.01

    def broken(rows):
        raise DeviceLostError("step 3 failed in program decode_1")

    def wrong(rows):
        raise ZeroDivisionError

    async def main():
        device.before = slow
        with pytest.raises(DeadlineExceeded) as e:
            await llm.agenerate([1], **SETTINGS, deadline_ms=25)
        assert e.value.token_ids == answer([1], 3)
        for prompt in ([], [77], [1] * 100):
            with pytest.raises(RequestError):
                await llm.agenerate(prompt, **SETTINGS)
            with pytest.raises(RequestError):
                async with llm.astream(prompt, **SETTINGS) as stream:
                    await anext(stream)
        for before, error in ((broken, DeviceLostError), (wrong, ZeroDivisionError)):
            device.before = before
            got = await asyncio.gather(*(llm.agenerate([n], **SETTINGS) for n in (1, 2)), return_exceptions=True)
            assert [type(g) for g in got] == [error, error]
        device.before = slow
        assert (await llm.agenerate([1], **SETTINGS)).token_ids == answer([1])

    asyncio.run(main())


def test_close_ends_streams(fake_llm):  # noqa: F811
    llm, device = fake_llm(runs_ahead=False)

    async def main():
        device.hold_after(3)
        async with llm.astream([1], **{**SETTINGS, "max_tokens": 90}) as stream:
            for _ in range(3):
                await anext(stream)
            waiting = asyncio.create_task(ids(stream))
            await true(device.entered.is_set)
            closing = asyncio.create_task(asyncio.to_thread(llm.close))
            with pytest.raises(RequestError, match="^the model was closed while it answered$"):
                await waiting
            device.go()
            await closing
        with pytest.raises(RequestError, match="^the model was closed: load it again$"):
            await llm.agenerate([1])

    asyncio.run(main())


def test_a_loop_that_ends_takes_its_requests_along(fake_llm):  # noqa: F811
    llm, device = fake_llm()
    kept = []

    async def main():
        device.hold_after(3)
        kept.append(llm.astream([1], **{**SETTINGS, "max_tokens": 90}))
        await anext(kept[0])

    asyncio.run(main())
    device.go()
    until(lambda: not llm._shared._calls)
    assert len(device.steps) <= 5


def test_the_thread_ends_when_there_was_nothing_to_do_for_a_while(fake_llm, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shared_engine, "LINGER", 0.01)
    llm, device = fake_llm()
    for _ in range(2):
        assert asyncio.run(llm.agenerate([1], **SETTINGS)).token_ids == answer([1])
        until(lambda: not engine_threads())
    assert len(device.steps) == 12
