"""Brings weights to a GPU: threads read the file into small pinned buffers, check them and send them on.

They read rather than map: a mapped page costs a fault each, and a file that is cut off ends the process.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from aotc.artifact.checksum import crc32
from aotc.artifact.manifest import CHUNK_BYTES, TargetEntry
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.devices.driver import CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING

THREADS = 8  # more of them do not read the page cache faster
_BUFFERS = 2  # of a thread: one is filled while the other is on its way


class CudaWeights:
    """The parts of weights.bin that a target uses, one after the other in one block of the GPU's memory."""

    def __init__(self, artifact: Artifact, target: TargetEntry, device: CudaDevice) -> None:
        """Takes the memory; `upload` fills it. Every range but the last is of whole pages, so that all are aligned."""
        self._artifact, self._device, self._chunks = artifact, device, artifact.chunks_of(target)
        self._ranges = ranges = artifact.manifest.weight_ranges(target)
        self._begins = [offset for offset, _ in ranges]
        self._places = list(itertools.accumulate((n for _, n in ranges), initial=0))
        self._base = device.allocate(self._places[-1], zero=False)

    def address(self, offset: int) -> int:
        """Where on the GPU lies what is at `offset` of weights.bin. Raises ArtifactError outside the ranges."""
        n = bisect.bisect_right(self._begins, offset) - 1
        if n < 0 or offset - self._begins[n] >= self._ranges[n][1]:
            raise ArtifactError(f"a plan of {self._artifact.path} names weights that its manifest does not: compile again")
        return self._base + self._places[n] + offset - self._begins[n]

    def upload(self) -> None:
        """Copies the ranges; the checksum of every chunk that they touch is compared on the way.

        Raises ArtifactError naming the first damaged weight; what was copied before is no use then.
        """
        count = max(min(THREADS, len(os.sched_getaffinity(0)), len(self._chunks)), 1)
        todo = iter(self._chunks)  # whoever is ready takes the next one
        with self._artifact.open_weights() as file, ThreadPoolExecutor(count) as pool:
            whole = list(pool.map(lambda _: self._send(file, todo), range(count)))
        if not all(whole):
            self._artifact.check_weights(self._artifact.map_weights(check=False), count, self._chunks)  # names the weight
            raise ArtifactError(f"{self._artifact.path / 'weights.bin'} changed while it was read: copy the artifact again")

    def _send(self, file: int, todo: Iterator[int]) -> bool:
        """Sends what is used of chunks until none is left; False at a damaged one, after which nobody takes another."""
        device = self._device
        device.enter()
        stream = device.call("cuStreamCreate", CU_STREAM_NON_BLOCKING)
        block = device.pin(_BUFFERS * CHUNK_BYTES)
        sent = [device.call("cuEventCreate", CU_EVENT_DISABLE_TIMING) for _ in range(_BUFFERS)]
        reader, turns = _Reader(file), itertools.cycle(zip(np.split(block, _BUFFERS), sent, strict=True))
        try:
            for chunk, (buffer, event) in zip(todo, turns, strict=False):
                begin = chunk * CHUNK_BYTES
                device.call("cuEventSynchronize", event)
                data = buffer[: min(CHUNK_BYTES, self._artifact.manifest.weights_bytes - begin)]
                if not reader.read(data, begin) or crc32(data.data) != self._artifact.manifest.weights_crc32[chunk]:
                    for _ in todo:
                        pass
                    return False
                for offset, part in self._used(begin, data):
                    device.upload(self.address(offset), part, stream)
                device.call("cuEventRecord", event, stream)
            return True
        finally:
            device.call("cuStreamSynchronize", stream)
            for event in sent:
                device.call("cuEventDestroy", event)
            device.call("cuMemFreeHost", block.ctypes.data)
            device.call("cuStreamDestroy", stream)

    def _used(self, begin: int, data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The parts of a chunk that lie in the ranges, with their offsets."""
        end = begin + len(data)
        for n in range(max(bisect.bisect_right(self._begins, begin) - 1, 0), bisect.bisect_left(self._begins, end)):
            start, nbytes = self._ranges[n]
            low, high = max(start, begin), min(start + nbytes, end)
            if low < high:
                yield low, data[low - begin : high - begin]


class _Reader:
    """Reads chunks of a file into pinned memory, for one thread."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._between: np.ndarray | None = None  # ordinary memory, where the kernel cannot write into the driver's

    def read(self, data: np.ndarray, offset: int) -> bool:
        """Fills `data` from an offset; False where the file ends before."""
        if self._between is None:
            try:
                return self._fill(data, offset)
            except OSError as error:  # sandboxes whose kernel is a process do not see memory that a device maps
                if error.errno not in (errno.EFAULT, errno.EINVAL):
                    raise
            self._between = np.empty(CHUNK_BYTES, np.uint8)
        between = self._between[: len(data)]
        whole = self._fill(between, offset)
        np.copyto(data, between)
        return whole

    def _fill(self, data: np.ndarray, offset: int) -> bool:
        rest = data.data
        while len(rest):
            count = os.preadv(self._file, [rest], offset)  # without Python's lock
            if not count:
                return False
            rest, offset = rest[count:], offset + count
        return True
