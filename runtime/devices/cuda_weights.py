"""Brings weights to a GPU: threads fill small pinned buffers from the mapped file, check them and send them on."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from aotc.artifact.manifest import CHUNK_BYTES
from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError
from aotc.runtime.devices.cuda import CudaDevice

THREADS = 8  # more of them do not read the page cache faster
_BUFFERS = 2  # of a thread: one is filled while the other is on its way


def upload_weights(artifact: Artifact, device: CudaDevice, address: int) -> None:
    """Copies weights.bin to `address`; every chunk's checksum is compared on the way.

    Raises ArtifactError naming the first damaged weight; what was copied before is no use then.
    """
    weights = artifact.map_weights(check=False)
    starts = range(0, len(weights), CHUNK_BYTES)
    count = max(min(THREADS, len(os.sched_getaffinity(0)), len(starts)), 1)
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda n: _send(artifact, device, address, weights, starts[n::count]), range(count)))
    damaged = [start for start in found if start >= 0]
    if damaged:
        artifact.check_weights(weights, count)  # names the weight
        raise ArtifactError(f"{artifact.path / 'weights.bin'} changed while it was read: copy the artifact again")


def _send(artifact: Artifact, device: CudaDevice, address: int, weights: np.ndarray, starts: range) -> int:
    """Sends the chunks at `starts`; where the first damaged one begins, or -1."""
    device.make_current()
    stream = device.call("cuStreamCreate", 1)
    buffers = [device.pinned(CHUNK_BYTES) for _ in range(_BUFFERS)]
    sent = [device.call("cuEventCreate", 2) for _ in range(_BUFFERS)]  # without timing
    try:
        for n, start in enumerate(starts):
            chunk = weights[start : start + CHUNK_BYTES]
            buffer = buffers[n % _BUFFERS][: len(chunk)]
            device.call("cuEventSynchronize", sent[n % _BUFFERS])
            np.copyto(buffer, chunk)
            if zlib.crc32(buffer.data) != artifact.manifest.weights_crc32[start // CHUNK_BYTES]:
                return start
            device.upload(address + start, buffer, stream)
            device.call("cuEventRecord", sent[n % _BUFFERS], stream)
        return -1
    finally:
        device.call("cuStreamSynchronize", stream)
        for event in sent:
            device.call("cuEventDestroy", event)
        for buffer in buffers:
            device.call("cuMemFreeHost", buffer.ctypes.data)
        device.call("cuStreamDestroy", stream)
