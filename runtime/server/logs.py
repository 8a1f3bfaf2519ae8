"""The server's log: one line an event, as text or as JSON, with numbers and names in it and never a prompt.

Only the server's own loggers and uvicorn's get a handler: the root logger belongs to whoever embeds this.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGERS = ("aotc.server", "uvicorn")
_QUIET = ("/health", "/metrics")  # asked every few seconds by machines: told with --log-level debug
_log = logging.getLogger("aotc.server.access")


def tell(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Logs an event with fields; those that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": {k: v for k, v in fields.items() if v is not None}})


def configure(form: str, level: str, stream: TextIO | None = None) -> None:
    """Sets the server's loggers up: `form` is text or json. To standard error where no stream is given."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def _time(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class JsonLines(logging.Formatter):
    """One object a line: time, level, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)  # ASCII: a lone surrogate is no reason to lose a line


class TextLines(logging.Formatter):
    """The same for people: `TIME LEVEL EVENT KEY=VALUE...`."""

    def format(self, record: logging.LogRecord) -> str:
        said = [_time(record), record.levelname, record.getMessage()]
        for key, value in getattr(record, "fields", {}).items():
            said.append(f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}")
        text = " ".join(said)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class AccessLog:
    """Tells of each response, when it has ended: paths without their query, statuses, seconds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            client = scope.get("client")
            tell(
                _log, logging.DEBUG if scope["path"].startswith(_QUIET) else logging.INFO, "access",
                method=scope["method"], path=scope["path"], status=status or None,
                seconds=round(time.monotonic() - begin, 6), client=client[0] if client else None,
                request_id=scope.get("state", {}).get("request_id"),
            )  # fmt: skip
