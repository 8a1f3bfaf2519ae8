"""A client that costs little: kept connections to one server, each a protocol of asyncio's with its parser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from aotc.errors import RequestError
from aotc.loadtest.streams import ResponseParser, StreamError

FETCH_SECONDS = 30.0  # for what a server need not compute
STALE_SECONDS = 1.0
"""A kept connection that ends without an answer so soon had been closed before the request came: it is asked again."""

Receiver = Callable[[int, bytes, float], None]
"""Takes the status, bytes of the body, and when they came, in seconds of `time.perf_counter`."""


class Reply(NamedTuple):
    """How a response ended."""

    status: int
    reason: str
    headers: Mapping[str, str]


class Client:
    """Connections to the server at `url`, as many as there are requests at once. For use within one event loop.

    Raises RequestError for what is no address or no key.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise RequestError(f"{url} is no address of a server: write it as http://127.0.0.1:8000")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._secure = parts.scheme == "https"
        self._address = parts.hostname, port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("--api-key (or AOTC_API_KEY) is one line of ASCII")
        fields = [f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: */*", "User-Agent: aotc-bench"]
        if api_key is not None:
            fields.append(f"Authorization: Bearer {api_key}")
        self._fields = "\r\n".join(fields)
        self._idle: list[_Connection] = []

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """The bytes of a request, with a body of JSON unless it is None."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._fields}\r\n"
        if body is None:
            return f"{head}\r\n".encode()
        data = msgspec.json.encode(body)
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    async def send(self, request: bytes, receive: Receiver, timeout: float | None = None) -> Reply:
        """Sends a request and returns when the response is whole. Raises StreamError, OSError and TimeoutError."""
        async with asyncio.timeout(timeout or self.timeout):
            while self._idle:
                connection = self._idle.pop()  # the one used last: others the server may have closed meanwhile
                try:
                    return await self._over(connection, request, receive)
                except _Stale:
                    continue
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, *self._address, ssl=ssl.create_default_context() if self._secure else None
            )
            return await self._over(connection, request, receive)

    async def _over(self, connection: _Connection, request: bytes, receive: Receiver) -> Reply:
        try:
            parser = await connection.exchange(request, receive)
        except BaseException:
            connection.abort()
            raise
        if parser.reusable and connection.open:
            self._idle.append(connection)
        else:
            connection.abort()
        return Reply(parser.status, parser.reason, parser.headers)

    async def fetch(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of a response in one piece, which must be there within FETCH_SECONDS. Raises as `send`."""
        body = bytearray()

        def receive(_status: int, data: bytes, _at: float) -> None:
            body.extend(data)

        reply = await self.send(request, receive, min(self.timeout, FETCH_SECONDS))
        return reply.status, bytes(body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()


class _Stale(Exception):
    """A kept connection that the server had closed before it saw the request."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.open = False
        self._used, self._heard = False, False
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._receive: Receiver | None = None

    async def exchange(self, request: bytes, receive: Receiver) -> ResponseParser:
        """Raises _Stale, StreamError or OSError."""
        again, self._used = self._used, True
        if not self.open or self._transport is None:
            raise _Stale if again else StreamError("the server closed the connection without an answer")
        parser = ResponseParser()
        self._parser, self._receive, self._heard = parser, receive, False
        self._done = asyncio.get_running_loop().create_future()
        begin = time.perf_counter()
        self._transport.write(request)
        try:
            await self._done
        except (StreamError, OSError):
            if again and not self._heard and time.perf_counter() - begin < STALE_SECONDS:
                raise _Stale from None
            raise
        finally:
            self._parser = self._receive = self._done = None
        return parser

    def abort(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        parser, receive, done = self._parser, self._receive, self._done
        if parser is None or receive is None or done is None or done.done():
            self.abort()  # nobody asked
            return
        self._heard = True
        try:
            body = parser.feed(data)
            if body:
                receive(parser.status, body, now)
        except Exception as error:
            done.set_exception(error)
            return
        if parser.complete:
            done.set_result(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        done, parser = self._done, self._parser
        if done is None or parser is None or done.done():
            return
        if exc is not None:
            done.set_exception(exc)
            return
        try:
            parser.end()
        except StreamError as error:
            done.set_exception(error)
        else:
            done.set_result(None)


NO_ANSWER = "no whole answer within --timeout"


def explain(error: BaseException) -> str:
    """What went wrong with a request, in a line."""
    if isinstance(error, TimeoutError):
        return NO_ANSWER
    if isinstance(error, OSError):
        code = error.errno or 0  # asyncio has words of its own beside it, that say less
        return f"connection failed: {os.strerror(code) if code > 0 else error.strerror or error}"
    return " ".join(str(error).split())


def api_error(status: int, reason: str, body: bytes) -> str:
    """Status and message of an answer that is an error, OpenAI's or any other's."""
    message = ""
    with contextlib.suppress(msgspec.MsgspecError):
        message = error_message(msgspec.json.decode(body))
    return " ".join(f"status {status} {reason}: {message}".rstrip(": ").split())


def error_message(value: Any) -> str:
    """The message of an error object: {"error": {"message": ...}}, or what some servers send instead."""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            return error_message(value[key])
    return str(value)[:200]
