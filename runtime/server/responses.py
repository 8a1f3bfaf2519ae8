"""What goes back to clients: JSON, error objects, server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from aotc.errors import AotcError, RequestError

DONE = b"data: [DONE]\n\n"
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def json_response(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; its type follows from the status."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: AotcError) -> int:
    """The HTTP status of an error: its own, else the client's fault where the request is, else ours."""
    return getattr(error, "status", 400 if isinstance(error, RequestError) else 500)


def error_response(
    message: str, status: int, param: str | None = None, code: str | None = None, retry_after: int = 1
) -> Response:
    """A response that holds OpenAI's error object, with the headers that go with its status."""
    response = json_response(error_body(message, status, param, code), status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        response.headers["Retry-After"] = str(retry_after)
    return response


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. The generator is closed when the response ends, however it ends, not when it is collected:
    what it holds (the engine's slots) is free at once. `ended` is called then, also where nothing was ever sent."""

    def __init__(self, events: AsyncGenerator[bytes, None], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._ended = events, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._ended()


def completion_logprobs(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The completions endpoint's form of the entries of some tokens."""
    return {
        "tokens": [_spelling(p) for p in logprobs],
        "token_logprobs": [p["logprob"] for p in logprobs],
        "top_logprobs": [{_spelling(t): t["logprob"] for t in p["top_logprobs"]} for p in logprobs],
    }


def _spelling(entry: dict[str, Any]) -> str:
    """A token as a key: parts of characters would all be U+FFFD, so their bytes are spelt out, as OpenAI did."""
    data = bytes(entry["bytes"])
    return entry["token"] if data == entry["token"].encode() else "bytes:" + "".join(f"\\x{b:02x}" for b in data)
