"""Pages of the KV cache on their way between a GPU and the host's own memory, through pinned buffers of a fixed size.

What the GPU does stands in the order of its stream: a page is copied out before a step that comes later writes there, and
copied in before a step that comes later reads it. What the host does, a thread does: it empties buffers that came down, and
fills those that go up. Who steps the engine waits for neither; a copy that finds no free buffer goes on at a later step.
A copy that has begun waits for nothing but the copies before it, so none of them is stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from aotc.errors import DeviceError
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.driver import CU_EVENT_BLOCKING_SYNC

BUFFERS = 4  # copies by the GPU and by the host go on side by side


class _Buffer:
    """Pinned pages u8 [n, page_bytes], and events before and after the GPU copies them."""

    def __init__(self, device: CudaDevice, pages: np.ndarray) -> None:
        self.pages = pages
        self.begin, self.end = (
            device.hold("cuEventDestroy", device.call("cuEventCreate", CU_EVENT_BLOCKING_SYNC)) for _ in range(2)
        )


class CudaPages:
    """The pages that begin at the address `kv`; `pinned` u8 [buffers, pages, page_bytes] is what copies go through."""

    def __init__(self, device: CudaDevice, kv: int, pinned: np.ndarray) -> None:
        self._device, self._kv, self._page_bytes = device, kv, pinned.shape[2]
        self._buffers = [_Buffer(device, pages) for pages in pinned]
        self._free = deque(self._buffers)
        self._worker = ThreadPoolExecutor(1, "aotc-pages")  # its thread starts with the first copy
        self._error: DeviceError | None = None

    def save(self, ids: np.ndarray, data: np.ndarray) -> CudaSave:
        """Copies pages i32 [n] into u8 [n, page_bytes]."""
        return CudaSave(self, ids.copy(), data)

    def load(self, data: np.ndarray, ids: np.ndarray) -> CudaLoad:
        """Copies u8 [n, page_bytes], all of which was saved or is about to be, into pages i32 [n]."""
        return CudaLoad(self, ids.copy(), data)

    def settle(self) -> None:
        """Forgets all copies that nobody goes on with: every buffer is free. The stream must have been waited for."""
        self._worker.submit(int).result()
        self._free = deque(self._buffers)

    def close(self) -> None:
        """Waits until the thread touches no pinned memory any more."""
        self._worker.shutdown(cancel_futures=True)
        self._buffers.clear()
        self._free.clear()

    def take(self) -> _Buffer | None:
        """A buffer that is free now. Raises DeviceLostError where a copy has failed."""
        if self._error is not None:
            raise self._device.fail("copying pages", self._error)
        return self._free.popleft() if self._free else None

    def enqueue(self, copy: Callable[[np.ndarray, int], None], buffer: _Buffer, ids: np.ndarray) -> None:
        """Has the GPU copy between the buffer's first pages and these."""
        device = self._device
        device.enter()
        try:
            device.call("cuEventRecord", buffer.begin, device.stream)
            for page, number in zip(buffer.pages, ids.tolist(), strict=False):
                copy(page, self._kv + number * self._page_bytes)
            device.call("cuEventRecord", buffer.end, device.stream)
        except DeviceError as error:
            raise device.fail("copying pages", error) from None

    def down(self, page: np.ndarray, address: int) -> None:
        self._device.download(page, address)

    def up(self, page: np.ndarray, address: int) -> None:
        self._device.upload(address, page)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Has the thread do it, after all that it was given before."""
        return self._worker.submit(work, *arguments)

    def finish(self, buffer: _Buffer, into: np.ndarray | None) -> float:
        """In the thread: waits until the GPU has copied a buffer, empties it and frees it. How many seconds the GPU took,
        0 where it failed."""
        try:
            self._device.enter()
            self._device.call("cuEventSynchronize", buffer.end)
            seconds = self._device.call("cuEventElapsedTime", buffer.begin, buffer.end) / 1e3
        except DeviceError as error:
            self._error = error
            return 0.0
        if into is not None:
            into[:] = buffer.pages[: len(into)]
        self.free(buffer)
        return seconds

    def free(self, buffer: _Buffer) -> None:
        self._free.append(buffer)


class _Copy:
    """A copy under way; `_left` pages do not stand in the stream yet."""

    def __init__(self, pages: CudaPages, ids: np.ndarray, data: np.ndarray) -> None:
        self._pages, self._ids, self._data, self._left = pages, ids, data, len(ids)
        self._nbytes, self._seconds = 0, 0.0

    @property
    def took(self) -> tuple[int, float]:
        return self._nbytes, self._seconds

    def _finish(self, buffer: _Buffer, count: int, into: np.ndarray | None) -> None:
        seconds = self._pages.finish(buffer, into)
        if seconds:
            self._nbytes, self._seconds = self._nbytes + count * self._data.shape[1], self._seconds + seconds


class CudaSave(_Copy):
    """Out of the GPU, the last pages first."""

    def go_on(self) -> int:
        while self._left and (buffer := self._pages.take()) is not None:
            part = slice(max(self._left - len(buffer.pages), 0), self._left)
            self._pages.enqueue(self._pages.down, buffer, self._ids[part])
            self._pages.submit(self._finish, buffer, part.stop - part.start, self._data[part])
            self._left = part.start
        return self._left

    def stop(self) -> None:
        """What stands in the stream is emptied into memory that nobody reads."""


class CudaLoad(_Copy):
    """Into the GPU, the first pages first."""

    def __init__(self, pages: CudaPages, ids: np.ndarray, data: np.ndarray) -> None:
        super().__init__(pages, ids, data)
        self._filling: deque[tuple[Future[None], _Buffer, slice]] = deque()
        self._begun = 0

    def go_on(self) -> int:
        while self._filling and self._filling[0][0].done():
            filled, buffer, part = self._filling.popleft()
            filled.result()
            self._pages.enqueue(self._pages.up, buffer, self._ids[part])
            self._pages.submit(self._finish, buffer, part.stop - part.start, None)
            self._left -= part.stop - part.start
        while self._begun < len(self._ids) and (buffer := self._pages.take()) is not None:
            part = slice(self._begun, min(self._begun + len(buffer.pages), len(self._ids)))
            self._filling.append((self._pages.submit(_fill, buffer.pages, self._data[part]), buffer, part))
            self._begun = part.stop
        return self._left

    def stop(self) -> None:
        """Buffers that are being filled are free afterwards."""
        for _, buffer, _ in self._filling:
            self._pages.submit(self._pages.free, buffer)
        self._filling.clear()
        self._begun = len(self._ids)


def _fill(pages: np.ndarray, data: np.ndarray) -> None:
    pages[: len(data)] = data
