"""What the engine's process counts for the server's metrics, sent with its messages as differences: nothing is counted
twice, and an engine that is started again begins at zero."""

from __future__ import annotations

import time
from collections.abc import Callable

from aotc.runtime.engine import Engine
from aotc.runtime.sequence import TokenOutput
from aotc.runtime.server.messages import Load


class EngineMeter:
    """Watches one engine from its loop: `submitted` and `cancelled` requests, and each `step`."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._since: dict[str, float] = {}  # of those that have not run
        self._waits: list[float] = []
        self._steps: list[tuple[float, int, int]] = []
        self._sent = (0, 0, 0)

    def submitted(self, request_id: str) -> None:
        self._since[request_id] = self._clock()

    def cancelled(self, request_id: str) -> None:
        self._since.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        """A step of the engine."""
        begin, tokens = self._clock(), self._engine.computed_tokens
        outputs = self._engine.step()
        tokens = self._engine.computed_tokens - tokens
        running = self._engine.scheduler.running
        ended = sum(o.finish_reason is not None for o in outputs)
        self._steps.append((self._clock() - begin, len(running) + ended, tokens))
        if self._since:
            for output in outputs:
                self._ran(output.request_id, begin)
            for sequence in running:
                self._ran(sequence.request.request_id, begin)
        return outputs

    def _ran(self, request_id: str, begin: float) -> None:
        since = self._since.pop(request_id, None)
        if since is not None:
            self._waits.append(max(0.0, begin - since))

    def load(self) -> Load:
        """How busy the engine is now, and what it did since the last call."""
        scheduler = self._engine.scheduler
        pool = scheduler.pool
        if pool is None:
            seqs = scheduler.free_slots + len(scheduler.running)
            used = len(scheduler.running) / seqs if seqs else 0.0
            counts = (scheduler.preemptions, 0, 0)
        else:
            used = 1 - pool.free_pages / pool.num_pages
            prefixes = pool.prefixes
            counts = (scheduler.preemptions, *((prefixes.queries, prefixes.hits) if prefixes is not None else (0, 0)))
        lost, queries, hits = (now - before for now, before in zip(counts, self._sent, strict=True))
        load = Load(
            len(scheduler.running), len(scheduler.waiting), used, lost, queries, hits, self._waits, self._steps
        )
        self._sent, self._waits, self._steps = counts, [], []
        return load
