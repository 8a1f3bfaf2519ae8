"""The listening socket and uvicorn's settings: limits, and how the server ends."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from types import FrameType

import uvicorn

from aotc.errors import RequestError
from aotc.runtime.server.app import Server
from aotc.runtime.server.connection import Connection
from aotc.runtime.server.logs import AccessLog

_VANISHED = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 30),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
    ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 60_000),
)
"""Options of the kernel, which connections inherit: a client that went away without a word is found within a minute."""


class HttpServer(uvicorn.Server):
    """Runs a server's application. SIGTERM and SIGINT let answers in flight finish, for `shutdown_timeout` seconds; the
    second one ends the process at once."""

    def __init__(self, server: Server, *, log_level: str, access_log: bool, shutdown_timeout: int) -> None:
        self._server = server
        app = server.app()
        config = uvicorn.Config(
            AccessLog(app) if access_log else app, log_level=log_level, log_config=None, access_log=False,
            timeout_graceful_shutdown=shutdown_timeout, http=Connection, loop="asyncio",
            ws="none", lifespan="on", proxy_headers=False, server_header=False,
        )  # fmt: skip
        super().__init__(config)

    def give_up(self) -> None:
        """Ends the server as SIGTERM does."""
        self.should_exit = self._server.draining = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """The whole life of a process's server."""
        gc.collect()
        gc.freeze()  # what was made until now stays: collections that look through it would hold up streams
        super().run(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(4):  # turns of the loop: what has connected by now is accepted, and not reset
            await asyncio.sleep(0)
        await super().shutdown(sockets)

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
        for option, value in _VANISHED:
            listener.setsockopt(*option, value)
        listener.bind(address)
        listener.listen(1024)
        return listener
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"cannot listen on {host} port {port} ({reason}): choose --host and --port") from None
