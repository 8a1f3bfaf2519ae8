"""The HTTP application: routes, limits, errors. Text is made here, tokens come from the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from aotc.errors import AotcError
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.server import embeddings, protocol
from aotc.runtime.server.answer import Answer
from aotc.runtime.server.embeddings import ServedEncoder
from aotc.runtime.server.metrics import Metrics
from aotc.runtime.server.protocol import BadRequest, ChatRequest, CompletionRequest
from aotc.runtime.server.responses import error_response, json_response, status_of
from aotc.runtime.server.served import ServedModel

log = logging.getLogger("aotc.server")

BODY_SECONDS = 60.0  # a client has so long to send its body
SHORT_TEXT = 4096  # characters; a longer text is tokenized in a thread, so that streams go on meanwhile
_REQUEST_ID = re.compile(r"[\w.-]{1,128}\Z", re.ASCII)

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Settings:
    """What the server was started with."""

    api_key: str | None = None
    max_num_queued_reqs: int = 256


class Server:
    """The routes over the models' engines; all models have names of their own."""

    def __init__(
        self, settings: Settings, models: Sequence[ServedModel], metrics: Metrics,
        encoders: Sequence[ServedEncoder] = (),
    ) -> None:  # fmt: skip
        self.settings, self.metrics, self.draining = settings, metrics, False
        self.served = {model.name: model for model in models}
        self.encoders = {encoder.name: encoder for encoder in encoders}
        self.failure: str | None = None  # why it ended by itself
        self.on_failure: Callable[[], None] = lambda: None
        for model in models:
            model.engine.on_failed = self._model_failed

    def _model_failed(self) -> None:
        """Ends a server of which a model cannot even start, or which has no model left; else the others go on."""
        engines = [model.engine for model in self.served.values()]
        failed = [e.failed for e in engines if e.failed is not None]
        if len(failed) == len(engines) or any(e.failed is not None and not e.was_ready for e in engines):
            self.failure = failed[0]
            self.on_failure()

    def app(self) -> Starlette:
        """The ASGI application; its lifespan runs the engine."""
        routes = [
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{model:path}", self._guarded(self.model)),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self.embeddings), methods=["POST"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/health", self.ready),
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.show_metrics),
        ]
        handlers = {HTTPException: _no_route, Exception: _bug}
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a redirect would lead where the Host header says
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(model.engine.run()) for model in self.served.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _guarded(self, handler: Handler) -> Handler:
        """Key, request id and error objects around a handler."""

        async def run(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request_id = given if _REQUEST_ID.match(given) else secrets.token_hex(12)
            request.state.request_id = request_id
            try:
                self._authorise(request)
                response = await handler(request)
            except BadRequest as error:
                response = error_response(str(error), error.status, error.param, error.code, error.retry_after)
            except AotcError as error:
                response = error_response(
                    str(error), status_of(error), retry_after=int(getattr(error, "retry_after", 1))
                )
            except ClientDisconnect:
                response = Response(status_code=499)
            response.headers["X-Request-Id"] = request_id
            if self.draining:
                response.headers["Connection"] = "close"
            return response

        return run

    def _authorise(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "")
        # Starlette decodes headers as Latin-1: this is what was sent, also for a key beyond ASCII.
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode()):
            raise BadRequest("the API key is missing or wrong", 401, code="invalid_api_key")

    async def _body(self, request: Request, kind: type) -> Any:
        too_large = BadRequest(f"the body is larger than {protocol.MAX_BODY} bytes", 413)
        if int(request.headers.get("content-length", "0")) > protocol.MAX_BODY:  # uvicorn refuses what is no number
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message["body"]
                    more = message["more_body"]
                    if len(body) > protocol.MAX_BODY:
                        raise too_large
        except TimeoutError:
            raise BadRequest(f"the body did not arrive within {BODY_SECONDS:.0f} s", 408) from None
        return protocol.decode(bytes(body), kind)

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [model.card() for model in self._all().values()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return json_response((self.encoders.get(name) or self._choose(name)).card())

    def _all(self) -> dict[str, ServedModel | ServedEncoder]:
        return {**self.served, **self.encoders}

    async def live(self, _: Request) -> Response:
        return json_response({"status": "live"})

    async def ready(self, _: Request) -> Response:
        """Whether requests that come now are answered: by all models, for a balancer sees one server."""
        each = {name: model.status for name, model in self.served.items()}
        status = "draining" if self.draining else next((s for s in each.values() if s != "ready"), "ready")
        said: dict[str, Any] = {"status": status}
        failed = [m.engine.failed for m in self.served.values() if m.engine.failed is not None]
        if failed and status == "failed":
            said["message"] = failed[0]
        if len(each) > 1:
            said["models"] = each
        return json_response(said, 200 if status == "ready" else 503)

    async def show_metrics(self, _: Request) -> Response:
        for model in self.served.values():
            model.measure()
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        asked = await self._body(request, protocol.TokenizeRequest)
        model = self._choose(asked.model)
        ids = await _encode(model, asked.prompt, asked.add_special_tokens)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        asked = await self._body(request, protocol.DetokenizeRequest)
        model = self._choose(asked.model)
        if not all(0 <= t < model.vocab_size for t in asked.tokens):
            raise BadRequest(f"tokens holds a token id outside 0..{model.vocab_size - 1}", param="tokens")
        return json_response({"prompt": model.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = await self._body(request, CompletionRequest)
        model = self._choose(asked.model)
        prompts = protocol.prompts(asked.prompt)
        ids = [await _encode(model, p) if isinstance(p, str) else p for p in prompts]
        return await self._answer(request, model, asked, ids)

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = await self._body(request, ChatRequest)
        model = self._choose(asked.model)
        if model.template is None:
            raise BadRequest("the model has no chat template: use /v1/completions")
        arguments = protocol.template_arguments(asked)
        text = await asyncio.to_thread(model.template.render, asked.messages, **arguments)
        return await self._answer(request, model, asked, [await _encode(model, text, add_special_tokens=False)])

    async def embeddings(self, request: Request) -> Response:
        asked = await self._body(request, embeddings.EmbeddingRequest)
        encoder = embeddings.choose(self.encoders, asked.model)
        if self.draining:
            raise BadRequest("the server is shutting down", 503)
        return json_response(await embeddings.answer(encoder, asked, self.settings.max_num_queued_reqs))

    def _choose(self, name: str | None) -> ServedModel:
        """The model that a request asks for; it may leave the name out where there is one only."""
        if name is None and len(self.served) == 1:
            return next(iter(self.served.values()))
        if name in self.encoders:
            raise BadRequest(f"the model {name} is a text encoder: ask /v1/embeddings", param="model")
        known = ", ".join(self.served)
        if name is None:
            raise BadRequest(f"model must be one of those served here: {known}", param="model")
        if name not in self.served:
            raise BadRequest(f"the model {name[:80]!r} is not served here: {known}", 404, "model", "model_not_found")
        return self.served[name]

    async def _answer(
        self, request: Request, model: ServedModel, asked: CompletionRequest | ChatRequest, prompts: list[list[int]]
    ) -> Response:
        chat = isinstance(asked, ChatRequest)
        params, turn = _check(model, asked, prompts, "messages" if chat else "prompt"), protocol.turn(asked)
        self._admit(model, len(prompts) * params.n)
        head = protocol.envelope(chat, bool(asked.stream), request.state.request_id, model.name)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        answer = Answer(model, prompts, params, seed, head, chat, turn, request.state.request_id)
        if asked.stream:
            return answer.stream(asked.stream_options is not None and asked.stream_options.include_usage)
        return await answer.whole(request)

    def _admit(self, model: ServedModel, count: int) -> None:
        """Refuses a request while too many others wait, or for good when it alone is too many."""
        most = self.settings.max_num_queued_reqs
        if self.draining:
            raise BadRequest("the server is shutting down", 503)
        if model.engine.failed is not None:
            raise BadRequest(f"the engine cannot start: {model.engine.failed}", 503)
        if count > most:
            raise BadRequest(f"the request asks for {count} answers, this server takes {most} at once", param="n")
        if model.engine.unfinished + model.starting + count > most:
            raise BadRequest("too many requests are waiting: try again later", 429, code="rate_limit_exceeded")
        seconds = model.breaker.retry_after()
        if seconds is not None:
            message = f"the model failed too often: try again in {seconds} s"
            raise BadRequest(message, 503, code="circuit_open", retry_after=seconds)


async def _encode(model: ServedModel, text: str, add_special_tokens: bool = True) -> list[int]:
    if len(text) <= SHORT_TEXT:
        return model.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)


def _check(
    model: ServedModel, asked: CompletionRequest | ChatRequest, prompts: list[list[int]], field_name: str
) -> SamplingParams:
    """The settings of a request that fits the model. Raises BadRequest."""
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    most, vocab = model.max_model_len, model.vocab_size
    if longest >= most:
        message = f"the prompt has {longest} tokens, the model was compiled for {most} with its answer"
        raise BadRequest(message, param=field_name, code="context_length_exceeded")
    if not shortest:
        raise BadRequest("the prompt has no tokens", param=field_name)
    if not all(0 <= t < vocab for prompt in prompts for t in prompt):
        raise BadRequest(f"the prompt holds a token id outside 0..{vocab - 1}", param=field_name)
    return protocol.sampling_params(asked, model.generation_config, most - longest, vocab)


async def _no_route(_: Request, error: Exception) -> Response:
    """404 and 405 as OpenAI's clients expect errors."""
    assert isinstance(error, HTTPException)
    message = {404: "there is no such path", 405: "the path does not take this method"}.get(error.status_code)
    response = error_response(message or error.detail, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _bug(_: Request, error: Exception) -> Response:
    """Details go to the log, where Starlette's own handler writes the trace, never to the client."""
    return error_response("internal error", 500)
