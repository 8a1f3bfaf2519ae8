"""A streamed answer for asyncio: the engine works in a thread, and the event loop is only told of what has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aotc.runtime.shared_engine import SharedEngine
from aotc.runtime.text_stream import Call, Chunk, Completion

if TYPE_CHECKING:
    import asyncio


class AsyncStream:
    """`async with llm.astream(prompt) as stream: async for chunk in stream: ...`. Leaving the block cancels the request.

    The answer is computed whether it is read or not, and an unread one holds up nobody. Without the block, the request
    starts with the first chunk and is cancelled by `aclose`, or when the stream is collected.
    """

    def __init__(self, engine: SharedEngine, open_call: Callable[[], Call], end: Callable[[Call], None] | None = None):
        """`open_call` makes the call, on entry; `end` is called with it once, at its end, and has to cancel it."""
        self._engine, self._open, self._end = engine, open_call, end
        self._call: Call | None = None
        self._news: asyncio.Event | None = None
        self._over = False

    async def __aenter__(self) -> AsyncStream:
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the request unless it is done: its slot and cache are free after the step that runs."""
        self._finish()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        """The next piece. Raises what `generate` raises: RequestError, DeadlineExceeded, DeviceError."""
        if self._over:
            raise StopAsyncIteration
        call = self._start()
        try:
            await self._until(lambda: call.ready)
        except BaseException:  # the task is cancelled
            self._finish()
            raise
        if call.chunks:
            return call.read()
        self._finish()
        if call.error is not None:
            raise call.error
        raise StopAsyncIteration

    async def whole(self) -> Completion:
        """The answer, once it is whole."""
        call = self._start(streamed=False)
        try:
            await self._until(lambda: call.finished)
            call.read_all()
        finally:
            self._finish()
        if call.error is not None:
            raise call.error
        return call.completion()

    def _start(self, streamed: bool = True) -> Call:
        import asyncio  # a fifth of what a model imports, and most processes that start one do without

        if self._call is None:
            loop, news = asyncio.get_running_loop(), asyncio.Event()
            call = self._open()
            call.notify = lambda: loop.call_soon_threadsafe(news.set) and None
            call.streamed = streamed
            self._call, self._news = call, news
            try:
                self._engine.submit(call, attended=False)
            except BaseException:
                self._finish()
                raise
        return self._call

    async def _until(self, ready: Callable[[], bool]) -> None:
        assert self._news is not None
        while not ready():
            self._news.clear()
            if not ready():  # else it came before the event was cleared
                await self._news.wait()

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            if self._call is not None:
                (self._end or self._engine.cancel)(self._call)

    def __del__(self) -> None:
        call: Any = getattr(self, "_call", None)
        if call is not None and not self._over:
            self._finish()
