"""A client's connection: uvicorn's protocol with limits on how long a client may take, and fewer writes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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


class Connection(H11Protocol):
    """One client. A head that does not come and a buffer that is not taken end it; a peer that vanished without a word
    is found by the kernel (keep-alive, set in `http.listen`)."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Writer(transport, self.loop)))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await_head()
        else:
            self._head = _cancelled(self._head)

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
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """An idle connection is closed a little later: a request that its client has sent already is answered, and not
        met with a reset."""
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER, self._end)
        else:
            self.cycle.keep_alive = False

    def _end(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
