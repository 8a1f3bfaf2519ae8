"""A driver whose GPU does nothing before it is told to, or waited for: in the order of its stream, and with what lies in
memory then. Above it, a model whose keys and values are its tokens."""

from __future__ import annotations

import threading
from collections import Counter, deque
from functools import partial
from typing import Any

import numpy as np
from fake_cuda import ALLOCATING, FakeDriver
from fake_executor import next_token

from aotc.runtime.sequence import UNKNOWN

WAITING = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpy")
LATE = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuGraphLaunch")


class LateDriver(FakeDriver):
    """`late` from when a test says so. `waited` has what the thread that made the driver waited for, and allocated, since
    then; other threads wait until the GPU has got there by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.late, self.waited = False, []
        self._todo, self._recorded, self._host = deque(), Counter(), threading.get_ident()
        self._moved = threading.Condition(self._lock)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.late and threading.get_ident() == self._host and name in (*WAITING, *ALLOCATING):
            self.waited.append((name, *arguments))
        return super()._call(name, arguments)

    def work(self, count: int | None = None) -> None:
        """The GPU does what stands first in its stream."""
        with self._moved:
            for _ in range(len(self._todo) if count is None else min(count, len(self._todo))):
                self._todo.popleft()()
            self._moved.notify_all()

    def _enqueue(self, work: Any) -> None:
        if self.late:
            self._todo.append(work)
        else:
            work()

    def do_cuEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._recorded[event] += 1
        self._enqueue(partial(self._recorded.subtract, [event]))

    def do_cuEventSynchronize(self, event: int) -> None:  # noqa: N802
        if threading.get_ident() != self._host:
            assert self._moved.wait_for(lambda: not self._recorded[event], 30), "the GPU never gets there"
        while self._recorded[event]:
            self.work(1)

    def do_cuEventElapsedTime(self, begin: int, end: int) -> float:  # noqa: N802
        assert not self._recorded[begin] and not self._recorded[end], "it has not ended"
        return 0.5

    def do_cuStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        self.work()


def _late(name: str) -> Any:
    now = getattr(FakeDriver, f"do_{name}")

    def enqueue(self: LateDriver, *arguments: Any) -> None:
        self._enqueue(partial(now, self, *arguments))

    return enqueue


for _name in LATE:
    setattr(LateDriver, f"do_{_name}", _late(_name))


class TokenModel:
    """What graphs compute: they write each token where its key and value belong, read all tokens of a row back from there,
    and say what `next_token` says."""

    def __init__(self, executor: Any, driver: FakeDriver) -> None:
        self._executor, self._driver, self._last = executor, driver, {}
        self._graph = None
        driver.kernel = self._kernel

    def _kernel(self, symbol: str, arguments: list[int]) -> None:
        if len(self._driver.launched) != self._graph:  # a graph's first kernel computes all of it
            self._graph = len(self._driver.launched)
            self._step()

    def _step(self) -> None:
        executor, blocks = self._executor, self._driver.blocks
        step = np.ctypeslib.as_array(blocks[executor._step])

        def field(name: str) -> np.ndarray:
            offset, dtype, shape = executor.fields[name]
            return step[offset:].view(np.uint8)[: dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)

        pages = np.ctypeslib.as_array(blocks[executor._kv]).view(np.int32).reshape(executor.num_pages, -1)
        said = np.ctypeslib.as_array(blocks[executor._results]).view(np.int32)
        count = dict(zip(executor.target.dims, field("dims").tolist(), strict=False))["rows"]
        begins = field("query_start").tolist()
        for row in range(count):
            slot, length, size = int(field("kv_index")[row]), int(field("seq_lens")[row]), executor.page_size
            table = field("block_table")[row]
            for at in range(begins[row], begins[row + 1]):
                token, position = int(field("tokens")[at]), int(field("positions")[at])
                token = self._last[slot] if token == UNKNOWN else token
                page, place = pages[table[position // size]], position % size
                page[place] = page[-1 - place] = token  # at both ends of a page
            history = pages[table[: -(-length // size)]]
            first, last = history[:, :size].reshape(-1)[:length], history[:, : -1 - size : -1].reshape(-1)[:length]
            assert first.tolist() == last.tolist()
            said[row] = self._last[slot] = next_token(first.tolist())
