"""Everything that changes between steps of an LLM, in one block of memory with fixed places."""

from __future__ import annotations

import math

import numpy as np

from aotc.runtime.sampling import SAMPLER_DTYPE

ALIGNMENT = 64


def layout(
    max_tokens: int, max_rows: int, dims: int = 0, max_pages: int = 0
) -> tuple[dict[str, tuple[int, np.dtype, tuple[int, ...]]], int]:
    """(field -> (offset, dtype, shape at the bounds), bytes). Names are those of the programs' inputs.

    `dims` values of dims are among them for devices that read those from memory. A block table, for paged caches, comes
    last: only its rows in use need to be sent.
    """
    i32 = np.dtype(np.int32)
    fields = {
        "tokens": (i32, (max_tokens,)), "positions": (i32, (max_tokens,)), "rows": (i32, (max_tokens,)),
        "query_start": (i32, (max_rows + 1,)), "seq_lens": (i32, (max_rows,)), "kv_index": (i32, (max_rows,)),
        "sampler": (SAMPLER_DTYPE, (max_rows,)),
    }  # fmt: skip
    if dims:
        fields["dims"] = (i32, (dims,))
    if max_pages:
        fields["block_table"] = (i32, (max_rows, max_pages))
    placed, offset = {}, 0
    for name, (dtype, shape) in fields.items():
        placed[name] = (offset, dtype, shape)
        offset += -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return placed, offset


class StepInputs:
    """Views of one block; the host writes them before a step. Arrays are longer than a step needs."""

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    kv_index: np.ndarray
    sampler: np.ndarray
    dims: np.ndarray
    block_table: np.ndarray

    def __init__(self, block: np.ndarray, max_tokens: int, max_rows: int, dims: int = 0, max_pages: int = 0) -> None:
        self.fields, size = layout(max_tokens, max_rows, dims, max_pages)
        self.block = block[:size]
        self.block[:] = 0
        for name, (offset, dtype, shape) in self.fields.items():
            view = self.block[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype)
            setattr(self, name, view.reshape(shape))

    def used(self, rows: int) -> np.ndarray:
        """The part of the block that a step of `rows` rows needs."""
        if "block_table" not in self.fields:
            return self.block
        offset, dtype, (_, max_pages) = self.fields["block_table"]
        return self.block[: offset + rows * max_pages * dtype.itemsize]
