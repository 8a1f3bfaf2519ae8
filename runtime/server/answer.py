"""One request's answer: its choices run side by side in the engine, and leave as one response or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aotc.errors import AotcError
from aotc.runtime.detokenizer import Detokenizer
from aotc.runtime.llm import TextStream
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import TokenOutput
from aotc.runtime.server.logs import tell
from aotc.runtime.server.protocol import usage
from aotc.runtime.server.responses import (
    DONE,
    EventStream,
    completion_logprobs,
    error_body,
    event,
    json_response,
    status_of,
)
from aotc.runtime.server.served import ServedModel

log = logging.getLogger("aotc.server")

MAX_UNSENT = 4 << 20  # bytes of a stream that wait for its reader


class NoToken(AotcError):
    """The model's logits left nothing to choose from: this request fails, the engine goes on."""

    status = 500


class TooSlow(AotcError):
    """The client does not read its stream: the answer is given up."""

    status = 408


class TooLate(AotcError):
    """The request's time was over before its answer was done."""

    status = 504


class Piece(NamedTuple):
    """Text that has become final, and the logprobs of the tokens since the last piece."""

    text: str
    logprobs: list[dict[str, Any]]


@dataclass(eq=False)
class Choice:
    """One choice while it is made."""

    index: int
    prompt: list[int]
    params: SamplingParams
    number: int
    stream: TextStream
    text: str = ""
    tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    first_token: float | None = None  # seconds


class Answer:
    """The choices of a request for `prompts`, `params.n` of each. `head` is what every object begins with."""

    def __init__(
        self, model: ServedModel, prompts: list[list[int]], params: SamplingParams, seed: int, head: dict[str, Any],
        chat: bool, turn: tuple[int, str] = (0, ""), request_id: str = "",
    ) -> None:  # fmt: skip
        """`turn` is the request's priority and cache salt."""
        self._model, self._turn, self._request_id = model, turn, request_id
        self._unsent = 0  # bytes
        self._unbegun = len(prompts) * params.n
        model.starting += self._unbegun
        self._seed, self._head, self._chat = seed, head, chat
        self._failed = False  # by our fault
        self._prompt_tokens = sum(map(len, prompts))
        self._choices = [
            Choice(
                n * params.n + number, prompt, params, number,
                TextStream(params, Detokenizer(model.tokenizer, params.skip_special_tokens)),
            )
            for n, prompt in enumerate(prompts)
            for number in range(params.n)
        ]  # fmt: skip

    async def whole(self, request: Request) -> Response:
        """The answer in one piece. Raises RequestError, EngineGone and NoToken; ClientDisconnect when nobody waits."""
        try:
            return await self._whole(request)
        finally:
            self._begin(self._unbegun)

    async def _drain(self, choice: Choice) -> None:
        async for _ in self._run(choice):
            pass

    async def _whole(self, request: Request) -> Response:
        async with self._counted(), _connected(request):
            if len(self._choices) == 1:
                await self._drain(self._choices[0])
            else:
                work = [asyncio.create_task(self._drain(choice)) for choice in self._choices]
                async with _ending(*work):
                    await asyncio.gather(*work)
        choices = [self._whole_choice(choice) for choice in self._choices]
        return json_response({**self._head, "choices": choices, "usage": self._usage()})

    def stream(self, include_usage: bool) -> Response:
        """The answer as server-sent events."""
        return EventStream(self._events(include_usage), lambda: self._begin(self._unbegun))

    async def _events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()  # a slow reader holds up no other: MAX_UNSENT bounds it
        if include_usage:
            self._head["usage"] = None  # in every chunk but the last
        tasks = [asyncio.create_task(self._feed(choice, queue)) for choice in self._choices]
        async with self._counted(), _ending(*tasks):
            left = len(tasks)
            while left:
                ready = [await queue.get()]
                while not queue.empty():  # what has gathered leaves in one write
                    ready.append(queue.get_nowait())
                data = b"".join(item for item in ready if item is not None)
                left -= ready.count(None)
                self._unsent -= len(data)
                if data:
                    yield data
            if include_usage:
                yield event({**self._head, "choices": [], "usage": self._usage()})
            yield DONE

    def _begin(self, count: int) -> None:
        """So many choices are the engine's to count from now on, or will never begin."""
        self._unbegun -= count
        self._model.starting -= count

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None, None]:
        """Tells the breaker and the log how the request ended."""
        breaker, begin = self._model.breaker, time.monotonic()
        ticket = breaker.begin()
        try:
            yield
        finally:
            done = all(choice.finish_reason is not None for choice in self._choices)
            breaker.end(ticket, True if self._failed else False if done else None)
            firsts = [choice.first_token for choice in self._choices if choice.first_token is not None]
            tell(
                log, logging.INFO, "request", request_id=self._request_id, model=self._model.name,
                choices=len(self._choices), prompt_tokens=self._prompt_tokens, tokens=sum(c.tokens for c in self._choices),
                ttft=round(min(firsts), 6) if firsts else None, latency=round(time.monotonic() - begin, 6),
                outcome="error" if self._failed else "done" if done else "abort",
            )  # fmt: skip

    async def _feed(self, choice: Choice, queue: asyncio.Queue[bytes | None]) -> None:
        """Puts the events of one choice into the queue, and None at their end."""
        try:
            if self._chat:
                self._put(queue, self._chunk(choice, {"role": "assistant", "content": ""}, []))
            pieces = self._run(choice)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if self._unsent > MAX_UNSENT:
                        raise TooSlow("the client reads its answer too slowly")
                    text = {"content": piece.text} if self._chat else piece.text
                    self._put(queue, self._chunk(choice, text, piece.logprobs))
        except AotcError as error:
            self._put(queue, event(error_body(str(error), status_of(error))))
        except Exception:
            self._failed = True
            log.exception("a stream failed")
            self._put(queue, event(error_body("internal error", 500)))
        finally:
            queue.put_nowait(None)

    def _put(self, queue: asyncio.Queue[bytes | None], data: bytes) -> None:
        self._unsent += len(data)
        queue.put_nowait(data)

    async def _run(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        """Yields each piece of text that has become final. Leaving the iteration frees the engine's slot."""
        self._begin(1)
        metrics = self._model.metrics
        begin = last = time.monotonic()
        reason = "abort"
        source = self._model.engine.generate(
            choice.prompt, choice.params, self._seed, choice.number, *self._turn, self._model.request_timeout
        )
        try:
            async for output in source:
                now = time.monotonic()
                if output.token_id < 0:
                    pass
                elif choice.tokens:
                    metrics.inter_token.observe(now - last)
                else:
                    choice.first_token, choice.cached_tokens = now - begin, output.cached_tokens
                    metrics.first_token.observe(now - begin)
                    metrics.prompt_tokens.inc(len(choice.prompt))
                last = now
                piece = self._take(choice, output)
                if output.finish_reason == "deadline":
                    raise TooLate("the answer was not done in time")
                if output.finish_reason == "error":
                    raise NoToken("the model gave no valid token (NaN logits, or every token was forbidden)")
                metrics.generation_tokens.inc()
                if piece.text or piece.logprobs or choice.finish_reason:
                    yield piece
                if choice.finish_reason:
                    reason = choice.finish_reason
                    return
        except AotcError as error:
            reason = "error"
            self._failed = self._failed or status_of(error) >= 500
            raise
        finally:
            await source.aclose()
            metrics.finished(reason, len(choice.prompt), choice.tokens, time.monotonic() - begin)

    def _take(self, choice: Choice, output: TokenOutput) -> Piece:
        chunk = choice.stream.push(output)
        logprobs = []
        if output.logprobs:
            sampled, *best = (self._logprob(choice, *pair) for pair in output.logprobs)
            logprobs.append({**sampled, "top_logprobs": best})
        choice.tokens += len(chunk.token_ids)
        choice.text += chunk.text
        choice.logprobs += logprobs
        choice.finish_reason = chunk.finish_reason
        return Piece(chunk.text, logprobs)

    def _logprob(self, choice: Choice, token_id: int, logprob: float) -> dict[str, Any]:
        data = choice.stream.detokenizer.token_bytes(token_id)
        value = max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0  # JSON has no infinity
        return {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data)}

    def _usage(self) -> dict[str, Any]:
        cached = sum(choice.cached_tokens for choice in self._choices if choice.number == 0)
        return usage(self._prompt_tokens, sum(choice.tokens for choice in self._choices), cached)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": choice.text}} if self._chat else {"text": choice.text}
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stream.stop_reason,
            **said,
            "logprobs": self._logprobs(choice, choice.logprobs),
        }

    def _chunk(self, choice: Choice, said: Any, logprobs: list[dict[str, Any]]) -> bytes:
        """The event of one piece: `said` is a delta (chat) or text."""
        shown = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "delta" if self._chat else "text": said,
            "logprobs": self._logprobs(choice, logprobs),
        }
        return event({**self._head, "choices": [shown]})

    def _logprobs(self, choice: Choice, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        if choice.params.logprobs is None:
            return None
        return {"content": logprobs} if self._chat else completion_logprobs(logprobs)


@contextlib.asynccontextmanager
async def _ending(*tasks: asyncio.Task[None]) -> AsyncGenerator[None, None]:
    """Leaves no task behind, whichever way the block is left."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _connected(request: Request) -> AsyncGenerator[None, None]:
    """Ends the block with ClientDisconnect when the client leaves."""
    work, gone = asyncio.current_task(), False
    assert work is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and not work.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
