"""Whether the engine's process makes progress: it says something now and then, or else it is ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger("aotc.server")

BEAT = 5.0  # seconds within which a working engine says something
MISSED = 3  # beats in a row that are missed: the engine hangs
BEAT_PER_TOKEN = 0.1  # seconds more for each token of the step that it announced


class Watchdog:
    """Calls `kill` for an engine that does not load within `load_timeout` seconds (0: no limit), and for one that hangs:
    that missed some beats in a row."""

    def __init__(self, load_timeout: float, kill: Callable[[], None]) -> None:
        self._load_timeout, self._kill, self._beat = load_timeout, kill, BEAT
        self._silence = 0.0  # seconds that it has waited for a word
        self._patience = 0.0  # and those that the engine asked for

    def heard(self) -> None:
        """The engine said something."""
        self._silence = self._patience = 0.0

    def expect(self, tokens: int) -> None:
        """Its next step computes so many tokens."""
        self._patience = BEAT_PER_TOKEN * tokens

    async def watch(self, loaded: Callable[[], bool]) -> None:
        """Watches one process from its start, until cancelled.

        What it waits for is counted in its own turns, not read off a clock: when this process was stopped or busy, the
        engine's words may lie unread, and are read before the next turn.
        """
        self.heard()
        warned = 0
        while True:
            turn = min(1.0, self._beat / 4)
            await asyncio.sleep(turn)
            self._silence += turn
            missed = int(max(0.0, self._silence - self._patience) / self._beat)
            if not loaded():
                if 0 < self._load_timeout <= self._silence:
                    log.error("the engine did not load within %.0f s (--load-timeout): ending it", self._load_timeout)
                    self._kill()
            elif missed >= MISSED:
                log.error("the engine said nothing for %.0f s: ending it", self._silence)
                self._kill()
            elif missed > warned:
                log.warning("the engine said nothing for %.0f s", self._silence)
            warned = missed
