"""Sends requests when they are due and notes when each token of the answers came."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from aotc.loadtest.client import Client, api_error, error_message, explain
from aotc.loadtest.streams import EventParser, StreamError
from aotc.loadtest.workload import Asked

_MOST_ERROR = 4096  # bytes kept of an answer that is an error


@dataclass(slots=True)
class Outcome:
    """What came of a request; times are in seconds, as vLLM's benchmark defines them.

    start   when it was sent, of `time.perf_counter`; waiting for others (--max-concurrency) comes before
    ttft    from start to the first token
    latency from start to the last token
    itl     gaps between events with tokens: servers may put several tokens into one
    error   None, or why it does not count
    """

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    output_len: int = 0
    itl: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 where there is no other."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def says(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)

    @property
    def opens(self) -> bool:
        """Whether it names the speaker alone: that is no token, and some servers send it before the first."""
        return self.role is not None and not self.says


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def ends(self) -> bool:
        """Whether it holds a reason without a text: llama-server sends it after the last token, vLLM and aotc with a
        last token that has no text."""
        return self.finish_reason is not None and not self.text and (self.delta is None or not self.delta.says)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Listener:
    """Takes the answer to one request into its Outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._events = outcome, EventParser()
        self._last, self._count = 0.0, 0
        self._finished = False
        self._end: float | None = None  # when an event with a reason alone came
        self._status, self._rest = 0, bytearray()

    def receive(self, status: int, data: bytes, at: float) -> None:
        """Raises StreamError."""
        self._status = status
        if status != 200:
            self._rest += data[: _MOST_ERROR - len(self._rest)]
            return
        for event in self._events.feed(data):
            self._take(event, at)

    def finish(self, status: int, reason: str) -> None:
        """The response is whole. Raises StreamError where it was no answer."""
        if status != 200:
            raise StreamError(api_error(status, reason, bytes(self._rest)))
        for event in self._events.end():
            self._take(event, time.perf_counter())
        outcome = self._outcome
        if self._end is not None and not 0 < outcome.output_len <= self._count:
            self._count_token(self._end)  # more tokens than events so far, or nobody knows
        if not self._count:
            raise StreamError("the answer is a stream without a token")
        if not self._finished:
            raise StreamError("the answer ended without [DONE] and without a reason")
        outcome.output_len = outcome.output_len or self._count

    def _take(self, event: bytes, at: float) -> None:
        if event == b"[DONE]":
            self._finished = True
            return
        try:
            read = _decode(event)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise StreamError(f"an event that is none of OpenAI's API: {event[:80]!r}") from None
        if read.error is not None:
            raise StreamError(f"an error in the stream: {error_message(read.error)}")
        if read.usage is not None:
            self._outcome.prompt_len = read.usage.prompt_tokens or self._outcome.prompt_len
            self._outcome.output_len = read.usage.completion_tokens or self._outcome.output_len
        if read.choices:
            self._token(read.choices[0], at)

    def _token(self, choice: _Choice, at: float) -> None:
        if choice.finish_reason is not None:
            self._finished = True
        if choice.ends:
            self._end = at
        elif choice.finish_reason is not None or choice.delta is None or not choice.delta.opens:
            self._end = None
            self._count_token(at)

    def _count_token(self, at: float) -> None:
        outcome = self._outcome
        if self._count:
            outcome.itl.append(at - self._last)
        else:
            outcome.ttft = at - outcome.start
        outcome.latency = at - outcome.start
        self._last = at
        self._count += 1


async def ask(client: Client, asked: Asked) -> Outcome:
    """Sends one request and waits for its answer; whatever goes wrong is in the outcome's `error`."""
    outcome = Outcome(asked.prompt_len, time.perf_counter())
    listener = _Listener(outcome)
    try:
        reply = await client.send(asked.data, listener.receive)
        listener.finish(reply.status, reply.reason)
    except (StreamError, OSError) as error:
        outcome.error = explain(error)
    return outcome


async def run_load(
    client: Client, asked: Sequence[Asked], due: Sequence[float], concurrency: int | None = None,
    done: Callable[[Outcome], None] = lambda _: None,
) -> tuple[list[Outcome], float]:  # fmt: skip
    """Sends each request when it is due, in seconds from now, with at most `concurrency` unanswered.

    Returns the outcomes in the order of the requests, and the seconds until the last one was there. `done` sees each
    as it comes.
    """
    gate = asyncio.Semaphore(concurrency or len(asked))

    async def one(request: Asked) -> Outcome:
        async with gate:
            outcome = await ask(client, request)
        done(outcome)
        return outcome

    gc.collect()
    gc.freeze()  # requests that wait are not looked through again and again
    try:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, at in zip(asked, due, strict=True):
                wait = begin + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(request)))
        return [task.result() for task in tasks], time.perf_counter() - begin
    finally:
        gc.unfreeze()
