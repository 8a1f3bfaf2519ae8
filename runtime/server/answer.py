"""One request's answer: its choices run side by side in the engine, and leave as one response or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aotc.errors import AotcError
from aotc.runtime.detokenizer import Detokenizer
from aotc.runtime.llm import TextStream
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.server.choice import Choice, Piece
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


class TooSlow(AotcError):
    """The client does not read its stream: the answer is given up."""

    status = 408


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
        self._broken = False  # a stream has failed that should not
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

    def _pieces(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        self._begin(1)
        return choice.run(self._model, self._seed, self._turn)

    async def _drain(self, choice: Choice) -> None:
        async for _ in self._pieces(choice):
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
            failed = self._broken or any(choice.failed for choice in self._choices)
            breaker.end(ticket, True if failed else False if done else None)
            firsts = [choice.first_token for choice in self._choices if choice.first_token is not None]
            tell(
                log, logging.INFO, "request", request_id=self._request_id, model=self._model.name,
                choices=len(self._choices), prompt_tokens=self._prompt_tokens, tokens=sum(c.tokens for c in self._choices),
                ttft=round(min(firsts), 6) if firsts else None, latency=round(time.monotonic() - begin, 6),
                outcome="error" if failed else "done" if done else "abort",
            )  # fmt: skip

    async def _feed(self, choice: Choice, queue: asyncio.Queue[bytes | None]) -> None:
        """Puts the events of one choice into the queue, and None at their end."""
        try:
            if self._chat:
                self._put(queue, self._chunk(choice, {"role": "assistant", "content": ""}, []))
            pieces = self._pieces(choice)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if self._unsent > MAX_UNSENT:
                        raise TooSlow("the client reads its answer too slowly")
                    text = {"content": piece.text} if self._chat else piece.text
                    self._put(queue, self._chunk(choice, text, piece.logprobs))
        except AotcError as error:
            self._put(queue, event(error_body(str(error), status_of(error))))
        except Exception:
            self._broken = True
            log.exception("a stream failed")
            self._put(queue, event(error_body("internal error", 500)))
        finally:
            queue.put_nowait(None)

    def _put(self, queue: asyncio.Queue[bytes | None], data: bytes) -> None:
        self._unsent += len(data)
        queue.put_nowait(data)

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
