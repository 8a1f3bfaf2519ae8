"""The listening socket and uvicorn's settings: limits, and how the server ends."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from aotc.errors import RequestError
from aotc.runtime.server.app import Server

MAX_HEAD = 64 << 10  # bytes of a request's line and headers


class HttpServer(uvicorn.Server):
    """Runs a server's application. SIGTERM and SIGINT let answers in flight finish, for `shutdown_timeout` seconds; the
    second one ends the process at once."""

    def __init__(self, server: Server, *, log_level: str, access_log: bool, shutdown_timeout: int) -> None:
        self._server = server
        config = uvicorn.Config(
            server.app(), log_level=log_level, access_log=access_log, timeout_graceful_shutdown=shutdown_timeout,
            http="h11", h11_max_incomplete_event_size=MAX_HEAD, ws="none",
        )  # fmt: skip
        super().__init__(config)

    def give_up(self) -> None:
        """Ends the server as SIGTERM does."""
        self.should_exit = self._server.draining = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)  # the kernel ends the engines with their server
        self._server.draining = True  # readiness fails at once
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises RequestError where the address is taken or not this machine's.

    It names its protocol: asyncio sends small writes at once (TCP_NODELAY) on such sockets alone, and without that
    every answer waits 40 ms for an acknowledgement.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol or socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        return listener
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"cannot listen on {host} port {port} ({reason}): choose --host and --port") from None
