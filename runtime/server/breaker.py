"""A circuit breaker: a model that mostly fails is left alone for a while, and its clients hear so at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class State(Enum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Thresholds(NamedTuple):
    """When a breaker opens: with `least` outcomes or more within `window` seconds, `rate` of them failures or more.

    It stays open for `rest` seconds, twice as long each time that its trials fail, `longest` at most. Then as many as
    `trials` requests are let through at once, and that many successes close it.
    """

    window: float = 30.0
    least: int = 20
    rate: float = 0.5
    rest: float = 5.0
    longest: float = 60.0
    trials: int = 3


class CircuitBreaker:
    """Counts how requests ended. Not thread-safe; `clock` gives monotonic seconds.

    closed -> open when too many fail; open -> half-open after a rest; half-open -> closed when the trials succeed,
    -> open when one fails. What is the client's own fault, or its leaving, is no outcome.
    """

    def __init__(self, thresholds: Thresholds | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = thresholds or Thresholds(), clock
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._opened: float | None = None  # when it opened; None while it is closed
        self._rest = self._limits.rest
        self._trials = self._successes = 0  # of the half-open state: running, succeeded
        self._epoch = 0  # outcomes of requests let through before it last opened or closed say nothing

    @property
    def state(self) -> State:
        if self._opened is None:
            return State.CLOSED
        return State.HALF_OPEN if self._clock() - self._opened >= self._rest else State.OPEN

    def retry_after(self) -> int | None:
        """None where a request may come now, else whole seconds, 1 or more, after which to try again."""
        state = self.state
        if state is State.CLOSED or (state is State.HALF_OPEN and self._trials < self._limits.trials):
            return None
        assert self._opened is not None
        return max(1, math.ceil(self._opened + self._rest - self._clock()))

    def begin(self) -> int:
        """Counts a request in; what it returns is given to `end`."""
        if self.state is State.HALF_OPEN:
            self._trials += 1
        return self._epoch

    def end(self, ticket: int, failed: bool | None) -> None:
        """Counts a request out; None is no outcome."""
        if ticket != self._epoch:
            return
        if self._opened is not None:
            self._end_trial(failed)
        elif failed is not None:
            self._count(failed)

    def _end_trial(self, failed: bool | None) -> None:
        self._trials -= 1
        if failed:
            self._open(min(2 * self._rest, self._limits.longest))
        elif failed is False:
            self._successes += 1
            if self._successes >= self._limits.trials:
                self._opened, self._rest = None, self._limits.rest
                self._restart()

    def _count(self, failed: bool) -> None:
        now = self._clock()
        self._outcomes.append((now, failed))
        self._failures += failed
        while self._outcomes[0][0] <= now - self._limits.window:
            self._failures -= self._outcomes.popleft()[1]
        enough = len(self._outcomes) >= self._limits.least
        if failed and enough and self._failures >= self._limits.rate * len(self._outcomes):
            self._open(self._limits.rest)

    def _open(self, rest: float) -> None:
        self._opened, self._rest = self._clock(), rest
        self._restart()

    def _restart(self) -> None:
        self._outcomes.clear()
        self._failures = self._trials = self._successes = 0
        self._epoch += 1
