"""Responses as they come in, without sockets: HTTP/1.1 framing (RFC 9112) and server-sent events.

Both parsers give the same whatever pieces the bytes arrive in, and hold at most `MOST` bytes.
"""

from __future__ import annotations

from aotc.errors import AotcError

MOST = 4 << 20  # bytes of a head, or of a line of an event


class StreamError(AotcError):
    """What came is no HTTP response, or no stream of events of OpenAI's API."""


class ResponseParser:
    """One response to a POST or GET: `feed` returns the bytes of the body that came. `status` is 0 until the head is
    there; `complete` says that the body has ended, and `reusable` that the connection takes another request then."""

    __slots__ = ("status", "reason", "headers", "complete", "reusable", "_buffer", "_read", "_left")

    def __init__(self) -> None:
        self.status, self.reason, self.headers = 0, "", {}
        self.complete, self.reusable = False, False
        self._buffer, self._read, self._left = bytearray(), self._head, 0

    def feed(self, data: bytes) -> bytes:
        """Raises StreamError."""
        self._buffer += data
        body = []
        while not self.complete:
            part = self._read()
            if part is None:
                if len(self._buffer) > MOST:
                    raise StreamError(f"a head of more than {MOST} bytes")
                break
            body.append(part)
        else:
            if self._buffer:
                self.reusable = False  # there is more than the answer
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> None:
        """The connection was closed. Raises StreamError where the response was not to end so."""
        if self.complete:
            return
        if not self.status:
            raise StreamError("the server closed the connection without an answer")
        if self._read != self._until_close:
            raise StreamError("the server closed the connection in the middle of its answer")
        self.complete = True

    def _line(self) -> bytes | None:
        at = self._buffer.find(b"\n")
        if at < 0:
            return None
        line = bytes(self._buffer[:at])
        del self._buffer[: at + 1]
        return line.removesuffix(b"\r")

    def _head(self) -> bytes | None:
        at, gap = self._buffer.find(b"\r\n\r\n"), 4
        if at < 0:
            return None
        head = bytes(self._buffer[:at]).decode("latin-1")
        del self._buffer[: at + gap]
        first, *lines = head.split("\r\n")
        version, _, rest = first.partition(" ")
        code, _, reason = rest.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or len(code) != 3 or not (code.isascii() and code.isdigit()):
            raise StreamError(f"no HTTP response: {first[:60]!r}")
        fields = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        if 100 <= int(code) < 200:  # an interim response
            return b""
        self.status, self.reason, self.headers = int(code), reason, headers
        options = headers.get("connection", "").lower()
        self.reusable = "close" not in options and (version == "HTTP/1.1" or "keep-alive" in options)
        self._choose_body()
        return b""

    def _choose_body(self) -> None:
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self.complete = True
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._read = self._chunk_size
        elif length is None:
            self._read, self.reusable = self._until_close, False
        elif length.isascii() and length.isdigit():
            self._read, self._left = self._counted, int(length)
            self.complete = not self._left
        else:
            raise StreamError(f"Content-Length is {length[:60]!r}")

    def _take(self, most: int) -> bytes:
        part = bytes(self._buffer[:most])
        del self._buffer[:most]
        return part

    def _until_close(self) -> bytes | None:
        return self._take(len(self._buffer)) or None

    def _counted(self) -> bytes | None:
        part = self._take(self._left)
        self._left -= len(part)
        self.complete = not self._left
        return part or None

    def _chunk_size(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        size = line.partition(b";")[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise StreamError(f"the size of a chunk is {size[:60]!r}") from None
        if self._left < 0:
            raise StreamError(f"the size of a chunk is {size[:60]!r}")
        self._read = self._chunk if self._left else self._trailer
        return b""

    def _chunk(self) -> bytes | None:
        part = self._take(self._left)
        self._left -= len(part)
        if not self._left:
            self._read = self._chunk_end
        return part or None

    def _chunk_end(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        if line:
            raise StreamError(f"a chunk is longer than its size: {line[:60]!r}")
        self._read = self._chunk_size
        return b""

    def _trailer(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        self.complete = not line
        return b""


class EventParser:
    """The data of server-sent events: `feed` returns those that are whole, `end` the one that no blank line ended."""

    __slots__ = ("_buffer", "_data")

    def __init__(self) -> None:
        self._buffer, self._data = b"", []

    def feed(self, data: bytes) -> list[bytes]:
        """Raises StreamError."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MOST:
            raise StreamError(f"an event of more than {MOST} bytes")
        return [event for line in lines if (event := self._take(line.removesuffix(b"\r"))) is not None]

    def end(self) -> list[bytes]:
        events = [self._take(self._buffer), self._take(b"")]
        self._buffer = b""
        return [event for event in events if event is not None]

    def _take(self, line: bytes) -> bytes | None:
        """The data of an event that the line ends. Fields other than data, and comments, say nothing here."""
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif not line and self._data:
            event, self._data = b"\n".join(self._data), []
            return event
        return None
