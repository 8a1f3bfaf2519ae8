"""Refuses a request at once where too many, or for too long, wait before it: better than an answer that comes too late."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from aotc.errors import OverloadedError
from aotc.runtime.scheduler import Scheduler
from aotc.runtime.sequence import Request, Sequence

_WEIGHT = 0.2  # of the last wait in the mean
_LONGEST = 60.0  # seconds that a client is told to stay away, at most


class QueueLimits:
    """`max_reqs` requests may wait for a slot, or for pages; and nobody is queued behind one that has waited for
    `max_ms`. None is no limit."""

    def __init__(
        self, scheduler: Scheduler, max_reqs: int | None, max_ms: float | None, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._max_reqs, self._max_ms, self._clock = scheduler, max_reqs, max_ms, clock
        self._wait = 0.0  # seconds until a slot, a mean

    def check(self, request: Request) -> None:
        """Raises OverloadedError where the request would wait behind too much."""
        if self._max_reqs is not None and self._queued >= self._max_reqs:
            self._refuse("too many requests are waiting", self._wait)
        if self._max_ms is not None:
            oldest = self._oldest(request.priority)
            if 1000 * oldest > self._max_ms:
                self._refuse(f"requests have been waiting for {oldest:.1f} s", max(oldest, self._wait))

    @property
    def _queued(self) -> int:
        """How many would wait before a new request, were it queued; -1 and less where it finds a slot at once. As far
        as slots and the last step tell."""
        scheduler = self._scheduler
        return len(scheduler.waiting) - (0 if scheduler.blocked else scheduler.free_slots)

    def admitted(self, sequence: Sequence) -> None:
        """Takes note of how long a sequence waited for its first turn."""
        if sequence.cached_tokens is None:
            self._wait += _WEIGHT * (self._clock() - sequence.since - self._wait)

    def _oldest(self, priority: int) -> float:
        """Seconds that the oldest of those that go before a new one of this priority has waited. Preempted ones do not
        count: they had their turn."""
        waiting, since, place = self._scheduler.waiting, math.inf, 0
        while place < len(waiting) and waiting[place].request.priority <= priority:
            first, place = waiting[place], place + 1
            if first.cached_tokens is not None:
                continue
            since = min(since, first.since)  # those of its priority came after it
            own = first.request.priority
            if place < len(waiting) and waiting[place].request.priority == own:
                place = bisect_left(waiting, (own + 1, 0), place, key=attrgetter("turn"))
        return 0.0 if since == math.inf else self._clock() - since

    def _refuse(self, why: str, seconds: float) -> None:
        after = float(math.ceil(min(max(seconds, 1.0), _LONGEST)))
        raise OverloadedError(f"{why}: try again in {after:.0f} s", after)
