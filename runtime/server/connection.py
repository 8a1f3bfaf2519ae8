"""A client's connection: uvicorn's protocol with limits on what a client may send, and on how long it may take."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 << 10  # bytes of a request's line and headers, and of what is neither head nor body
HEAD_SECONDS = 30.0  # a client has so long to send a request's line and headers, once it has begun or connected
WRITE_SECONDS = 60.0  # and so long to take what fills the connection's buffer
LINGER = 0.3  # seconds for a request that is under way when the server begins to shut down: it gets an answer


class Writer:
    """A transport that holds a response's head back until its body comes, or until the loop's next turn: one packet,
    one call of the kernel, not two. Waking the client is most of what a short answer costs."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._held = transport, loop, b""

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.") and not self._held:
            self._held = data
            self._loop.call_soon(self._flush)
        elif data:
            held, self._held = self._held, b""
            self._transport.write(held + data if held else data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Unknown(int):
    """The length of a body that ends with its connection, for uvicorn to compare and to count down."""

    def __lt__(self, sent: int) -> bool:
        return False

    def __sub__(self, sent: int) -> int:
        return self

    def __ne__(self, left: object) -> bool:
        return False


class Connection(HttpToolsProtocol):
    """One client. A head that does not come and a buffer that is not taken end it; a peer that vanished without a word
    is found by the kernel (keep-alive, set in `http.listen`)."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _unparsed = 0  # bytes in which the parser found neither a head's end nor a piece of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Writer(transport, self.loop)))
        self._asked: list[RequestResponseCycle] = []
        self._await_head()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unparsed += len(data)
        try:
            self._feed(data)
            if self._unparsed > MAX_HEAD:
                raise httptools.HttpParserError("too long")
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)
        if self.timeout_keep_alive_task is None and not self._unanswered():
            self._await_head()
        else:
            self._head = _cancelled(self._head)

    def _feed(self, data: bytes) -> None:
        """Parses. A client's offer to speak another protocol is not taken: what follows it is HTTP."""
        while data:
            assert self.parser is not None
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:  # the parser believes that the offer is taken: begin anew
                lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[offer.args[0] :]])
                self.parser = httptools.HttpRequestParser(self)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        assert self.parser is not None
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")  # the parser makes it its own error
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise ValueError("a request has one Host")  # RFC 9112, 3.2
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # such a client knows no chunks
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, Unknown()
        self._asked = [*self._unanswered(), self.cycle]
        self.headers = []  # trailers go nowhere

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if self.parser is not None and not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """After what is no HTTP; not into the answers that are under way."""
        self._asked = self._unanswered()
        if not self._asked or (not self._asked[0].response_started and self._asked[0].more_body):
            super().send_400_response(msg)
        elif self.cycle.more_body:
            self.transport.close()
        else:  # it came behind whole requests, which are answered first
            self.cycle.keep_alive = False
            self.flow.pause_reading()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._asked if not cycle.response_complete]

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stalled = _cancelled(self._stalled)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._stalled = _cancelled(self._head), _cancelled(self._stalled)
        for cycle in self._unanswered():  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """An idle connection is closed a little later: a request that its client has sent already is answered, and not
        met with a reset."""
        if not self._unanswered():
            self.loop.call_later(LINGER, self._end)
        else:
            self.cycle.keep_alive = False

    def _end(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
