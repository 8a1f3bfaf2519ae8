"""Brings weights to a GPU: threads fill small pinned buffers from the mapped file, check them and send them on."""

from __future__ import annotations

import bisect
import itertools
import os
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from aotc.artifact.manifest import CHUNK_BYTES, TargetEntry
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError
from aotc.runtime.devices.cuda import CudaDevice

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
        weights = self._artifact.map_weights(check=False)
        chunks = self._chunks
        count = max(min(THREADS, len(os.sched_getaffinity(0)), len(chunks)), 1)
        with ThreadPoolExecutor(count) as pool:
            whole = list(pool.map(lambda n: self._send(weights, chunks[n::count]), range(count)))
        if not all(whole):
            self._artifact.check_weights(weights, count, chunks)  # names the weight
            raise ArtifactError(f"{self._artifact.path / 'weights.bin'} changed while it was read: copy the artifact again")

    def _send(self, weights: np.ndarray, chunks: list[int]) -> bool:
        """Sends what is used of the chunks; False at the first damaged one."""
        device = self._device
        device.enter()
        stream = device.call("cuStreamCreate", 1)
        buffers = [device.pin(CHUNK_BYTES) for _ in range(min(_BUFFERS, len(chunks)))]
        sent = [device.call("cuEventCreate", 2) for _ in buffers]  # without timing
        try:
            for n, chunk in enumerate(chunks):
                begin = chunk * CHUNK_BYTES
                data = weights[begin : begin + CHUNK_BYTES]
                buffer, event = buffers[n % _BUFFERS][: len(data)], sent[n % _BUFFERS]
                device.call("cuEventSynchronize", event)
                np.copyto(buffer, data)
                if zlib.crc32(buffer.data) != self._artifact.manifest.weights_crc32[chunk]:
                    return False
                for start, nbytes in self._ranges:
                    low, high = max(start, begin), min(start + nbytes, begin + len(data))
                    if low < high:
                        device.upload(self.address(low), buffer[low - begin : high - begin], stream)
                device.call("cuEventRecord", event, stream)
            return True
        finally:
            device.call("cuStreamSynchronize", stream)
            for event in sent:
                device.call("cuEventDestroy", event)
            for buffer in buffers:
                device.call("cuMemFreeHost", buffer.ctypes.data)
            device.call("cuStreamDestroy", stream)
