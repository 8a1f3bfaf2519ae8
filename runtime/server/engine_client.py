"""The server's side of the engine process: starts it, restarts it, and gives each request its stream of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aotc.errors import DeviceError, RequestError
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import TokenOutput
from aotc.runtime.server.engine_process import EXIT_ARTIFACT
from aotc.runtime.server.messages import (
    MAX_FRAME,
    Alive,
    Cancel,
    Outputs,
    Ready,
    Refused,
    Submit,
    pack,
    params_to_dict,
    unpack,
)

log = logging.getLogger("aotc.server")

SILENCE = 15.0  # seconds without a word: the engine hangs
BACKOFF = (0.1, 0.5, 2.0, 10.0)


class EngineGone(DeviceError):
    """The engine died while it answered this request."""


@dataclass(eq=False)
class _Pending:
    submit: Submit
    queue: asyncio.Queue[TokenOutput | Exception] = field(default_factory=asyncio.Queue)
    started: bool = False


class EngineClient:
    """One engine process. `command` is the child's command line without the descriptor; tests replace it."""

    def __init__(self, artifact: str, max_num_seqs: int, command: list[str] | None = None) -> None:
        module = "aotc.runtime.server.engine_process"
        self._command = command or [sys.executable, "-m", module]
        self._arguments = [artifact, str(max_num_seqs)]
        self._pending: dict[str, _Pending] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = time.monotonic()
        self.ready = asyncio.Event()
        self.memory: dict[str, int] = {}
        self.running, self.waiting, self.cache_usage, self.restarts = 0, 0, 0.0, 0
        self.failed: str | None = None
        self.on_step: Callable[[Outputs], None] = lambda outputs: None

    @property
    def unfinished(self) -> int:
        return len(self._pending)

    async def run(self) -> None:
        """Keeps an engine alive until cancelled. Requests that have sent nothing are submitted to the next one."""
        try:
            while self.failed is None:
                await self._life()
                self._end_started()
                if self.failed is None:
                    delay = BACKOFF[min(self.restarts, len(BACKOFF) - 1)]
                    self.restarts += 1
                    log.error("the engine ended, starting another in %.1f s", delay)
                    await asyncio.sleep(delay)
        finally:
            self._kill()

    async def _life(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [*self._command, str(descriptor), *self._arguments], pass_fds=[descriptor], env=environment, close_fds=True
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._heard = time.monotonic()
        for pending in self._pending.values():
            self._writer.write(pack(pending.submit))
        watchdog = asyncio.create_task(self._watch())
        try:
            await self._read(reader)
        finally:
            watchdog.cancel()
            self.ready.clear()
            self._writer.close()
            code = await self._stopped()
            if code == EXIT_ARTIFACT:
                self.failed = "the artifact does not load here; the engine's message stands above"

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                if length > MAX_FRAME:
                    return
                self._take(unpack(await reader.readexactly(length)))

    def _take(self, message: object) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Outputs):
            self.running, self.waiting, self.cache_usage = message.running, message.waiting, message.cache_usage
            self.restarts = 0
            for token in message.tokens:
                pending = self._pending.get(token.request_id)
                if pending is not None:
                    pending.started = True
                    pending.queue.put_nowait(token)
            self.on_step(message)
        elif isinstance(message, Refused):
            pending = self._pending.get(message.request_id)
            if pending is not None:
                pending.queue.put_nowait(RequestError(message.message))
        elif isinstance(message, Ready):
            self.memory = message.memory
            self.ready.set()
        elif not isinstance(message, Alive):
            log.warning("an unexpected message from the engine: %s", type(message).__name__)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.ready.is_set() and time.monotonic() - self._heard > SILENCE:
                log.error("the engine said nothing for %.0f s: ending it", SILENCE)
                self._kill()

    async def _stopped(self) -> int:
        process = self._process
        assert process is not None
        for _ in range(50):
            if process.poll() is not None:
                return process.returncode
            await asyncio.sleep(0.02)
        self._kill()
        return process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _end_started(self) -> None:
        for pending in self._pending.values():
            if pending.started or self.failed:
                pending.queue.put_nowait(EngineGone(self.failed or "the engine failed while it answered"))

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, choice: int = 0
    ) -> AsyncIterator[TokenOutput]:
        """Yields the tokens of a request. Leaving the iteration cancels it. Raises RequestError and EngineGone."""
        request_id = secrets.token_hex(8)
        pending = _Pending(Submit(request_id, prompt, params_to_dict(params), seed, choice))
        self._pending[request_id] = pending
        finished = False
        try:
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(pack(pending.submit))
            while True:
                item = await pending.queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
                if finished:
                    return
        finally:
            del self._pending[request_id]
            if not finished and self._writer is not None and not self._writer.is_closing():
                self._writer.write(pack(Cancel(request_id)))
