"""The HTTP application: routes, limits, errors. Text is made here, tokens come from the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from aotc.errors import RequestError
from aotc.runtime.chat_template import ChatTemplate
from aotc.runtime.detokenizer import Detokenizer
from aotc.runtime.llm import TextStream
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.server import protocol
from aotc.runtime.server.engine_client import EngineClient, EngineGone
from aotc.runtime.server.metrics import Metrics
from aotc.runtime.server.protocol import BadRequest, ChatRequest, CompletionRequest
from aotc.runtime.tokenizer import Tokenizer

MAX_PROMPTS = 64  # of one completion request
_REQUEST_ID = re.compile(r"[\w.-]{1,128}\Z")


@dataclass(frozen=True)
class Settings:
    """What the server was started with."""

    model: str
    max_model_len: int
    vocab_size: int
    api_key: str | None = None
    max_num_queued_reqs: int = 256
    generation_config: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Answer:
    """One choice while it is made."""

    index: int
    params: SamplingParams
    stream: TextStream
    text: str = ""
    tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Server:
    """The routes over one engine."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        metrics: Metrics,
    ) -> None:
        self.settings, self.engine, self.tokenizer, self.template = settings, engine, tokenizer, template
        self.metrics, self.draining = metrics, False

    def app(self) -> Starlette:
        """The ASGI application; its lifespan runs the engine."""
        routes = [
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/health", self.ready),
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.show_metrics),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.engine.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Key, request id and error objects around a handler."""

        async def run(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request_id = given if _REQUEST_ID.match(given) else secrets.token_hex(12)
            request.state.request_id = request_id
            try:
                self._authorise(request)
                response = await handler(request)
            except BadRequest as error:
                response = _error(str(error), error.status, error.param, error.code)
            except RequestError as error:
                response = _error(str(error), 400)
            except EngineGone as error:
                response = _error(str(error), 503)
            except ClientDisconnect:
                response = Response(status_code=499)
            response.headers["X-Request-Id"] = request_id
            return response

        return run

    def _authorise(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise BadRequest("the API key is missing or wrong", 401, code="invalid_api_key")

    async def _body(self, request: Request, kind: type) -> Any:
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > protocol.MAX_BODY:
            raise BadRequest(f"the body is larger than {protocol.MAX_BODY} bytes", 413)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > protocol.MAX_BODY:
                raise BadRequest(f"the body is larger than {protocol.MAX_BODY} bytes", 413)
        return protocol.decode(bytes(body), kind)

    async def models(self, _: Request) -> Response:
        model = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "aotc"}
        return _json({"object": "list", "data": [model | {"max_model_len": self.settings.max_model_len}]})

    async def live(self, _: Request) -> Response:
        return _json({"status": "live"})

    async def ready(self, _: Request) -> Response:
        able = self.engine.ready.is_set() and not self.draining
        return _json({"status": "ready" if able else "not ready"}, 200 if able else 503)

    async def show_metrics(self, _: Request) -> Response:
        self.metrics.running.set(self.engine.running)
        self.metrics.waiting.set(self.engine.waiting)
        self.metrics.cache_usage.set(self.engine.cache_usage)
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        asked = await self._body(request, protocol.TokenizeRequest)
        ids = self.tokenizer.encode(asked.prompt, asked.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.settings.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        asked = await self._body(request, protocol.DetokenizeRequest)
        return _json({"prompt": self.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = await self._body(request, CompletionRequest)
        self._check_model(asked.model)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in _prompts(asked.prompt)]
        return await self._answer(request, asked, ids, "completion")

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = await self._body(request, ChatRequest)
        self._check_model(asked.model)
        if self.template is None:
            raise BadRequest("the model has no chat template: use /v1/completions")
        text = await asyncio.to_thread(self.template.render, asked.messages)
        return await self._answer(request, asked, [self.tokenizer.encode(text, add_special_tokens=False)], "chat")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise BadRequest(
                f"the model {name!r} is not served here: {self.settings.model}", 404, "model", "model_not_found"
            )

    async def _answer(
        self, request: Request, asked: CompletionRequest | ChatRequest, prompts: list[list[int]], kind: Any
    ) -> Response:
        if self.draining:
            raise BadRequest("the server is shutting down", 503)
        longest = max(map(len, prompts))
        room = self.settings.max_model_len - longest
        if room < 1:
            raise BadRequest(
                f"the prompt has {longest} tokens, the model was compiled for {self.settings.max_model_len}",
                param="messages" if kind == "chat" else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        vocab = self.settings.vocab_size
        if not all(0 <= t < vocab for prompt in prompts for t in prompt):
            raise BadRequest(f"the prompt holds a token id outside 0..{vocab - 1}", param="prompt")
        params = protocol.sampling_params(asked, self.settings.generation_config, room)
        params.check_vocab(vocab)
        count = len(prompts) * params.n
        if self.engine.unfinished + count > self.settings.max_num_queued_reqs:
            response = _error("too many requests are waiting", 429, code="rate_limit_exceeded")
            response.headers["Retry-After"] = "1"
            return response
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        jobs = []
        for n, prompt in enumerate(prompts):
            for choice in range(params.n):
                stream = TextStream(params, Detokenizer(self.tokenizer, params.skip_special_tokens))
                answer = _Answer(n * params.n + choice, params, stream)
                jobs.append((answer, self._run(answer, prompt, seed, choice)))
        head = protocol.envelope(kind, asked.stream, request.state.request_id, self.settings.model)
        tokens = sum(map(len, prompts))
        if asked.stream:
            include = asked.stream_options is not None and asked.stream_options.include_usage
            events = self._stream(jobs, head, kind, tokens, include)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(request, jobs, head, kind, tokens)

    async def _run(self, answer: _Answer, prompt: list[int], seed: int, choice: int) -> AsyncIterator[tuple[str, list]]:
        """Yields (text, logprobs) of each token that makes text final."""
        begin = last = time.monotonic()
        metrics, reason = self.metrics, "abort"
        source = self.engine.generate(prompt, answer.params, seed, choice)
        try:
            async for output in source:
                now = time.monotonic()
                (metrics.inter_token if answer.tokens else metrics.first_token).observe(now - last)
                last = now
                chunk = answer.stream.push(output)
                answer.tokens += len(chunk.token_ids)
                answer.text += chunk.text
                logprobs = [self._logprob(pair, output.logprobs[1:]) for pair in output.logprobs[:1]]
                answer.logprobs += logprobs
                if chunk.finish_reason == "error":
                    reason = "error"
                    raise EngineGone("the model gave no valid token (NaN logits, or every token was forbidden)")
                answer.finish_reason = chunk.finish_reason
                if chunk.text or logprobs or chunk.finish_reason:
                    yield chunk.text, logprobs
                if chunk.finish_reason:
                    reason = chunk.finish_reason
                    return
        finally:
            await source.aclose()  # type: ignore[attr-defined]
            metrics.finished(reason)
            metrics.prompt_tokens.inc(len(prompt))
            metrics.generation_tokens.inc(answer.tokens)
            metrics.end_to_end.observe(time.monotonic() - begin)

    def _logprob(self, sampled: tuple[int, float], best: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        return {**self._token_logprob(sampled), "top_logprobs": [self._token_logprob(pair) for pair in best]}

    def _token_logprob(self, pair: tuple[int, float]) -> dict[str, Any]:
        text = self.tokenizer.decode([pair[0]], skip_special_tokens=False)
        return {"token": text, "logprob": max(pair[1], -9999.0) if math.isfinite(pair[1]) else -9999.0,
                "bytes": list(text.encode())}  # fmt: skip

    async def _whole(self, request: Request, jobs: list, head: dict, kind: str, prompt_tokens: int) -> Response:
        async def drain(events: AsyncIterator[Any]) -> None:
            async for _ in events:
                pass

        work = asyncio.gather(*(drain(events) for _, events in jobs))
        watch = asyncio.create_task(_gone(request))
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if not work.done():  # the client left: nobody reads the answer, so its slots are freed now
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            raise ClientDisconnect
        work.result()
        choices = [_choice(a, kind) for a, _ in jobs]
        total = sum(a.tokens for a, _ in jobs)
        return _json({**head, "choices": choices, "usage": protocol.usage(prompt_tokens, total)})

    async def _stream(
        self, jobs: list, head: dict, kind: str, prompt_tokens: int, include_usage: bool
    ) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

        async def feed(answer: _Answer, events: AsyncIterator[tuple[str, list]]) -> None:
            try:
                if kind == "chat":
                    queue.put_nowait(
                        _event({**head, "choices": [_delta(answer, {"role": "assistant", "content": ""}, [])]})
                    )
                async for text, logprobs in events:
                    delta = {"content": text} if kind == "chat" else text
                    queue.put_nowait(_event({**head, "choices": [_delta(answer, delta, logprobs)]}))
            except (RequestError, EngineGone) as error:
                queue.put_nowait(_event(protocol.error_body(str(error), "server_error")))
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(feed(a, e)) for a, e in jobs]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                else:
                    yield item  # type: ignore[misc]
            if include_usage:
                total = sum(a.tokens for a, _ in jobs)
                yield _event({**head, "choices": [], "usage": protocol.usage(prompt_tokens, total)})
            yield b"data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request: one text, one list of ids, or a list of texts or of lists. Raises BadRequest."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [p for p in prompt if isinstance(p, int)]
    if prompt and len(ids) == len(prompt):
        return [ids]
    if ids or not 1 <= len(prompt) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must be a text, token ids, or 1 to {MAX_PROMPTS} of either", param="prompt")
    return [p for p in prompt if not isinstance(p, int)]


async def _gone(request: Request) -> None:
    """Returns when the client has left."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _choice(answer: _Answer, kind: str) -> dict[str, Any]:
    common = {"index": answer.index, "finish_reason": answer.finish_reason, "stop_reason": answer.stream.stop_reason}
    if kind == "chat":
        logprobs = {"content": answer.logprobs} if answer.params.logprobs is not None else None
        return {**common, "message": {"role": "assistant", "content": answer.text}, "logprobs": logprobs}
    return {
        **common,
        "text": answer.text,
        "logprobs": _legacy(answer.logprobs) if answer.params.logprobs is not None else None,
    }


def _delta(answer: _Answer, delta: Any, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = answer.params.logprobs is not None
    common = {"index": answer.index, "finish_reason": answer.finish_reason}
    if isinstance(delta, str):
        return {**common, "text": delta, "logprobs": _legacy(logprobs) if wanted else None}
    return {**common, "delta": delta, "logprobs": {"content": logprobs} if wanted else None}


def _legacy(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The completions endpoint's own form."""
    return {
        "tokens": [p["token"] for p in logprobs],
        "token_logprobs": [p["logprob"] for p in logprobs],
        "top_logprobs": [{t["token"]: t["logprob"] for t in p["top_logprobs"]} for p in logprobs],
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return _json(protocol.error_body(message, kind, param, code), status)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
