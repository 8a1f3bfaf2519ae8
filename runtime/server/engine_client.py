"""The server's side of the engine process: starts it, restarts it, and gives each request its stream of tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from aotc.errors import DeviceError, DeviceLostError, OverloadedError, RequestError
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import TokenOutput
from aotc.runtime.server.messages import (
    Alive,
    Cancel,
    Load,
    Message,
    Outputs,
    Ready,
    Refused,
    Submit,
    Unusable,
    messages,
    pack,
    params_to_dict,
)
from aotc.runtime.server.watchdog import Watchdog

log = logging.getLogger("aotc.server")

LOAD_SECONDS = 1800.0
BACKOFF = (0.1, 0.5, 2.0, 10.0)
MAX_DEATHS = 2  # engines that a request may see die before its first token: it may be what kills them
GRACE = 1.0  # seconds in which an engine whose connection was closed ends by itself


class EngineGone(DeviceError):
    """There is no engine for this request: it died while it answered, or will not come up again."""

    status = 503


@dataclass(eq=False)
class _Pending:
    submit: Submit
    queue: asyncio.Queue[TokenOutput | Exception] = field(default_factory=asyncio.Queue)
    started: bool = False
    deaths: int = 0
    over: bool = False  # its error is in the queue


class _Line(asyncio.Protocol):
    """The engine's end of the connection: messages go to `take` as they come. `ended` is None when the engine has closed
    it, or what was wrong with what it sent."""

    def __init__(self, take: Callable[[Message], None]) -> None:
        self._take, self._buffer = take, bytearray()
        self.ended: asyncio.Future[ValueError | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for message in messages(self._buffer):
                self._take(message)
        except ValueError as error:  # msgspec's errors too
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None)

    def _end(self, error: ValueError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class EngineClient:
    """One engine process at a time. `command` is its command line before the descriptor; tests replace it.

    `ready` is set while an engine takes requests. `failed` is why there will never be one again, or None. An engine that
    is not ready within `load_timeout` seconds (0: no limit) is ended and started again.
    """

    def __init__(
        self, artifact: str, max_num_seqs: int, command: list[str] | None = None, device: str = "auto",
        kv_layout: str | None = None, kv_cache_memory: str | None = None, load_timeout: float = LOAD_SECONDS,
    ) -> None:  # fmt: skip
        self._command = command or [sys.executable, "-m", "aotc.runtime.server.engine_process"]
        kind, _, self._gpu = device.partition(":")
        self._arguments = [artifact, str(max_num_seqs), kind, kv_layout or "", kv_cache_memory or ""]
        self._pending: dict[str, _Pending] = {}
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog = Watchdog(load_timeout, self._kill)
        self._short_lives = 0  # engines in a row that gave no token
        self.was_ready = False
        self.ready = asyncio.Event()
        self.memory: dict[str, int] = {}
        self.load = Load()
        self.on_load: Callable[[Load], None] = lambda load: None
        self.on_memory: Callable[[dict[str, int]], None] = lambda memory: None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_failed: Callable[[], None] = lambda: None
        self.failed: str | None = None

    @property
    def unfinished(self) -> int:
        """Requests without their last token."""
        return len(self._pending)

    async def run(self) -> None:
        """Keeps an engine alive until cancelled or `failed`. Requests that got no token yet go to the next one."""
        try:
            while self.failed is None:
                try:
                    await self._life()
                except OSError as error:  # no memory or descriptors for a process: there may be some later
                    log.error("the engine's process does not start: %s", error)
                self._end_requests()
                if self.failed is None:
                    delay = BACKOFF[min(self._short_lives, len(BACKOFF) - 1)]
                    self._short_lives += 1
                    self.on_restart()
                    log.error("the engine ended, starting another in %.1f s%s", delay, self._why())
                    await asyncio.sleep(delay)
            log.error("the engine cannot start: %s", self.failed)
            self.on_failed()
        finally:
            self._kill()

    async def _life(self) -> None:
        """One process, from its start until it has ended."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            descriptor = theirs.fileno()
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            if self._gpu:
                environment["CUDA_VISIBLE_DEVICES"] = _gpu(int(self._gpu), environment.get("CUDA_VISIBLE_DEVICES"))
            command = [*self._command, str(descriptor), *self._arguments]
            self._process = subprocess.Popen(command, pass_fds=[descriptor], env=environment)
            theirs.close()
            try:
                self._transport, line = await asyncio.get_running_loop().create_connection(
                    lambda: _Line(self._take), sock=ours
                )
                await self._converse(line)
            finally:
                self.ready.clear()
                self.load = Load()
                if self._transport is not None:
                    self._transport.abort()  # nothing that was not sent matters any more
                await self._stopped(self._process)

    async def _converse(self, line: _Line) -> None:
        """Hands over what waits, then stays until the engine is gone, silent, or talks nonsense."""
        for pending in self._pending.values():
            if not pending.over:
                self._send(pending.submit)
        watching = asyncio.create_task(self._watchdog.watch(self.ready.is_set))
        try:
            error = await line.ended
            if error is not None:
                log.error("the engine sent what is no message (%s): ending it", error)
                self._kill()
        finally:
            watching.cancel()

    def _take(self, message: Message) -> None:
        self._watchdog.heard()
        if isinstance(message, Outputs):
            self._short_lives = 0
            self._note(message.load)
            for token in message.tokens:
                pending = self._pending.get(token.request_id)
                if pending is not None:
                    pending.started = True
                    pending.queue.put_nowait(token)
        elif isinstance(message, Alive):
            self._note(message.load)
            self.on_memory(message.memory)
            self._watchdog.expect(message.tokens)
        elif isinstance(message, Refused):
            pending = self._pending.get(message.request_id)
            if pending is not None:
                later, text = message.retry_after, message.message
                pending.queue.put_nowait(RequestError(text) if later is None else OverloadedError(text, later))
        elif isinstance(message, Ready):
            self.memory, self.was_ready = message.memory, True
            self.on_memory(message.memory)
            self.ready.set()
        elif isinstance(message, Unusable):
            if message.may_pass and self.was_ready:
                log.error("the engine does not start: %s", message.message)
            else:
                self.failed = message.message
        else:
            log.warning("an unexpected message from the engine: %s", type(message).__name__)

    def _note(self, load: Load) -> None:
        self.load = load
        self.on_load(load)

    async def _stopped(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the end of a process whose connection is closed; kills it when it does not come."""
        end = time.monotonic() + GRACE
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
            await asyncio.sleep(0.01)

    def _why(self) -> str:
        """How the last process ended, as far as its exit code tells."""
        code = self._process.returncode if self._process is not None else None
        if not code:
            return ""
        if code == DeviceLostError.exit_code:
            return f" (exit code {code}: the device failed in a step)"
        return f" (signal {-code})" if code < 0 else f" (exit code {code})"

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _end_requests(self) -> None:
        """After an engine's end: fails the requests that it had begun, and those that may be what ends engines."""
        for pending in self._pending.values():
            pending.deaths += 1
            if self.failed is not None:
                self._fail(pending, f"the engine cannot start: {self.failed}")
            elif pending.started:
                self._fail(pending, "the engine failed while it answered: try again")
            elif pending.deaths >= MAX_DEATHS:
                self._fail(pending, f"the engine failed {MAX_DEATHS} times before it answered: try again later")

    def _fail(self, pending: _Pending, message: str) -> None:
        pending.over = True
        pending.queue.put_nowait(EngineGone(message))

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, choice: int = 0, priority: int = 0,
        cache_salt: str = "", timeout: float | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:  # fmt: skip
        """Yields the tokens of a request. Leaving the iteration cancels it. Raises RequestError and EngineGone."""
        if self.failed is not None:
            raise EngineGone(f"the engine cannot start: {self.failed}")
        request_id = secrets.token_hex(8)
        pending = _Pending(
            Submit(request_id, prompt, params_to_dict(params), seed, choice, priority, cache_salt, timeout)
        )
        self._pending[request_id] = pending
        finished = False
        try:
            self._send(pending.submit)
            while not finished:
                item = await pending.queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            del self._pending[request_id]
            if not finished:
                self._send(Cancel(request_id))

    def _send(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))


def _gpu(number: int, visible: str | None) -> str:
    """What makes the GPU of that number, counted among the visible ones, the engine's only one."""
    names = visible.split(",") if visible else None
    if names is None:
        return str(number)
    return names[number].strip() if number < len(names) else "none"  # the driver then finds no device and says so
