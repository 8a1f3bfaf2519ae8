"""When requests leave together: the policy of the dynamic batcher. Times are seconds of any clock; no threads, no device.

Requests of one queue may be computed together. A batch leaves when it is full, when it has just as many rows as a
program takes (one more would need the next larger program), when its oldest request has waited `max_wait`, or when
waiting is not worth it: when the next request is not expected before that, by the queue's average time between arrivals,
or did not come within PATIENCE times that average.

A caller that asks again once it is answered has a short time between arrivals, and waiting for it is in vain: it waits
itself. So each queue also has a trust in company: it grows when a request comes while another one waits or runs, and
shrinks when one waited and nobody came.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.25  # of the newest measurement in an exponential average
MARGIN = 0.001  # seconds between a deadline and the last moment at which a batch with it leaves, besides its run
TRUST = 0.25  # of at most 1, from which on a request waits; each event brings it half way to 1 or to 0
PATIENCE = 2.0  # average gaps without an arrival after which a batch waits no longer
IDLE_QUEUES = 64  # whose averages are remembered


@dataclass(frozen=True)
class BatchOptions:
    """Rows of a batch at most; seconds that a request waits for others at most; rows for which it waits that long even
    where few requests come; sizes that wait for nobody else, but for a single row, which would never have company. No
    batch is made smaller for a preferred size: a larger program with fewer rows takes less time than two programs."""

    max_batch_size: int
    max_wait: float = 0.005
    min_batch_size: int = 1
    preferred: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class _Entry(Generic[T]):
    item: T
    rows: int
    arrived: float
    deadline: float | None
    gone: bool = False


@dataclass(slots=True)
class _Queue(Generic[T]):
    entries: deque[_Entry[T]] = field(default_factory=deque)
    rows: int = 0  # of entries that are not gone
    deadlines: list[tuple[float, int, _Entry[T]]] = field(default_factory=list)  # a heap; may name entries that are gone
    gap: float | None = None  # average seconds between arrivals
    last: float | None = None  # arrival
    run: float = 0.0  # average seconds of a batch
    running: int = 0  # batches
    trust: float = 0.0  # in company

    def drop(self, entry: _Entry[T]) -> None:
        entry.gone = True
        self.rows -= entry.rows

    def prune(self) -> None:
        """Entries that are gone leave the front, where they would be taken for the oldest or the most urgent one."""
        while self.entries and self.entries[0].gone:
            self.entries.popleft()
        while self.deadlines and self.deadlines[0][2].gone:
            heapq.heappop(self.deadlines)


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Items of one queue, in the order in which they came."""

    key: Hashable
    items: list[T]
    rows: int


class BatchPolicy(Generic[T]):
    """Not thread-safe. Each item that was added comes out once: of `take`, of `expire` or of `clear`."""

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        sizes = [s for s in options.preferred if s <= options.max_batch_size]
        self._preferred = frozenset(s for s in sizes if s > 1)
        self._full = max(sizes, default=options.max_batch_size)
        self._active: dict[Hashable, _Queue[T]] = {}
        self._idle: OrderedDict[Hashable, _Queue[T]] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Items that wait."""
        return sum(sum(not e.gone for e in q.entries) for q in self._active.values())

    def add(self, key: Hashable, item: T, now: float, rows: int = 1, deadline: float | None = None) -> None:
        """Queues an item of 1 to `max_batch_size` rows."""
        assert 1 <= rows <= self.options.max_batch_size
        queue = self._active.get(key)
        if queue is None:
            queue = self._active[key] = self._idle.pop(key, None) or _Queue()
        if queue.last is not None:
            # An idle time says nothing but that waiting is not worth it: bounded, it is soon forgotten under load.
            gap = min(max(now - queue.last, 0.0), 4 * self.options.max_wait)
            queue.gap = gap if queue.gap is None else queue.gap + SHARE * (gap - queue.gap)
        if queue.rows or queue.running:
            queue.trust += (1 - queue.trust) / 2
        queue.last = now
        entry = _Entry(item, rows, now, deadline)
        queue.entries.append(entry)
        queue.rows += rows
        if deadline is not None:
            heapq.heappush(queue.deadlines, (deadline, next(self._numbers), entry))

    def expire(self, now: float) -> list[T]:
        """Takes out the items whose deadline is past."""
        out = []
        for key, queue in list(self._active.items()):
            while queue.deadlines and queue.deadlines[0][0] <= now:
                entry = heapq.heappop(queue.deadlines)[2]
                if not entry.gone:
                    queue.drop(entry)
                    out.append(entry.item)
            self._settle(key, queue)
        return out

    def take(self, now: float) -> Batch[T] | None:
        """A batch that leaves now: of the queues that have one, that with the oldest item."""
        ready = [(q.entries[0].arrived, n, key) for n, (key, q) in enumerate(self._active.items()) if self._leaves(q) <= now]
        if not ready:
            return None
        key = min(ready)[2]
        queue = self._active[key]
        waited = self._leaves(queue) > queue.entries[0].arrived
        most, items, rows = self.options.max_batch_size, [], 0
        for entry in queue.entries:
            if entry.gone:
                continue
            if items and rows + entry.rows > most:
                break
            items.append(entry.item)
            rows += entry.rows
            queue.drop(entry)
        queue.running += 1
        if waited and len(items) == 1:
            queue.trust /= 2
        self._settle(key, queue)
        return Batch(key, items, rows)

    def wake(self) -> float | None:
        """When `expire` or `take` have something to do, unless something comes before; None while nothing waits."""
        times = [self._leaves(q) for q in self._active.values()]
        times += [q.deadlines[0][0] for q in self._active.values() if q.deadlines]
        return min(times, default=None)

    def ran(self, key: Hashable, seconds: float) -> None:
        """Notes that a batch of a queue has ended, before anybody gets its answer, and how long it took: batches leave
        that long before a deadline."""
        queue = self._active.get(key) or self._idle.get(key)
        if queue is not None:
            queue.running = max(queue.running - 1, 0)
            queue.run += SHARE * (seconds - queue.run)

    def clear(self) -> list[T]:
        """Takes out everything."""
        out = [e.item for q in self._active.values() for e in q.entries if not e.gone]
        self._active.clear()
        return out

    def _leaves(self, queue: _Queue[T]) -> float:
        """When the batch at the front of a queue leaves, if nothing else comes."""
        oldest = queue.entries[0].arrived
        if queue.rows >= self._full or (queue.rows >= self.options.min_batch_size and queue.rows in self._preferred):
            return oldest
        latest = oldest + self.options.max_wait
        if queue.deadlines:
            latest = max(min(latest, queue.deadlines[0][0] - queue.run - MARGIN), oldest)
        if queue.rows < self.options.min_batch_size:
            return latest
        assert queue.last is not None
        if queue.gap is None or queue.trust < TRUST or queue.last + queue.gap > latest:
            return oldest
        return min(latest, queue.last + PATIENCE * queue.gap)

    def _settle(self, key: Hashable, queue: _Queue[T]) -> None:
        """After items were taken out of a queue."""
        queue.prune()
        if queue.entries:
            return
        del self._active[key]
        self._idle[key] = queue
        if len(self._idle) > IDLE_QUEUES:
            self._idle.popitem(last=False)
