"""Physical layouts of tensors, one row a packing.

Quantised formats are GGML's (ggml/src/ggml-common.h, block_q8_0, block_q4_0, block_q4_1): blocks of 32 weights w
along the last axis, numbers little endian, d and m float16.
  q8_0: d, 32 x i8 q        w = d q
  q4_0: d, 16 bytes         w = d (q - 8); byte i holds q of weight i (low bits) and of weight i + 16 (high bits)
  q4_1: d, m, 16 bytes      w = d q + m; q as in q4_0
Layouts of matmul weights [N, K] for CPUs keep the element type: 16 rows of N side by side for each step of K.
  n16k1: [ceil(N / 16), K, 16]                  (n, k) lies at [n // 16, k, n % 16]
  n16k2: [ceil(N / 16), ceil(K / 2), 16, 2]     (n, k) lies at [n // 16, k // 2, n % 16, k % 2]; zero padded
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]

_BLOCK = 32
_CHUNK = 4096  # blocks whose weights fit a cache
_ROWS = 16
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Packing:
    """One layout. `physical_shape` is that of the stored array: blocks are bytes, the rest is in the weight's dtype.

    `unpack(physical, shape)` gives the logical array: f32 for quantised formats, else the dtype of `physical`.
    `pack(logical)` is its inverse; None for quantised formats. `block` weights take `block_bytes` bytes in
    quantised formats; both are 0 elsewhere.
    """

    name: str
    physical_shape: Callable[[Shape], Shape]
    unpack: Callable[[np.ndarray, Shape], np.ndarray]
    pack: Callable[[np.ndarray], np.ndarray] | None = None
    block: int = 0
    block_bytes: int = 0


def _blocks(name: str, block_bytes: int, weights: Callable[[np.ndarray, np.ndarray], None]) -> Packing:
    def physical(shape: Shape) -> Shape:
        if shape[-1] % _BLOCK:
            raise ValueError(f"{name} packs rows in blocks of {_BLOCK}: {shape} does not divide")
        return (*shape[:-1], shape[-1] // _BLOCK, block_bytes)

    def unpack(blocks: np.ndarray, shape: Shape) -> np.ndarray:
        rows = blocks.reshape(-1, block_bytes)
        out = np.empty((len(rows), _BLOCK), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or nan: so is then the weight
            for at in range(0, len(rows), _CHUNK):
                weights(rows[at : at + _CHUNK], out[at : at + _CHUNK])
        return out.reshape(shape)

    return Packing(name, physical, unpack, None, _BLOCK, block_bytes)


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _f16(blocks, 0)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _f16(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _f16(blocks, 0)
    out += _f16(blocks, 2)


def _columns(step: int) -> Packing:
    def physical(shape: Shape) -> Shape:
        n, k = shape
        return (-(-n // _ROWS), k, _ROWS) if step == 1 else (-(-n // _ROWS), -(-k // step), _ROWS, step)

    def unit(dtype: np.dtype) -> type[np.unsignedinteger]:
        """An integer as wide as `step` elements: numpy moves integers several times faster than bfloat16 or pairs."""
        return _UNITS[dtype.itemsize * step]

    def pack(x: np.ndarray) -> np.ndarray:
        n, k = x.shape
        tiles = np.empty(physical((n, k)), x.dtype)
        padded = np.ascontiguousarray(x)
        if n % _ROWS or k % step:
            padded = np.zeros((len(tiles) * _ROWS, -(-k // step) * step), x.dtype)
            padded[:n, :k] = x
        rows = padded.view(unit(x.dtype)).reshape(len(tiles), _ROWS, -1)
        np.copyto(tiles.view(unit(x.dtype)).reshape(len(tiles), -1, _ROWS).transpose(0, 2, 1), rows)
        return tiles

    def unpack(tiles: np.ndarray, shape: Shape) -> np.ndarray:
        n, k = shape
        padded = np.empty((len(tiles) * _ROWS, -(-k // step) * step), tiles.dtype)
        steps = np.ascontiguousarray(tiles).view(unit(tiles.dtype)).reshape(len(tiles), -1, _ROWS)
        np.copyto(padded.view(unit(tiles.dtype)).reshape(len(tiles), _ROWS, -1), steps.transpose(0, 2, 1))
        return np.ascontiguousarray(padded[:n, :k])

    return Packing(f"n16k{step}", physical, unpack, pack)


PACKINGS: dict[str, Packing] = {
    p.name: p
    for p in (
        _blocks("q8_0", 34, _q8_0), _blocks("q4_0", 18, _q4_0), _blocks("q4_1", 20, _q4_1), _columns(1), _columns(2),
    )
}  # fmt: skip


def physical_bytes(packing: str, shape: Shape, itemsize: int) -> int:
    """Bytes of a packed tensor; blocks of quantised formats are bytes themselves."""
    row = PACKINGS[packing]
    return math.prod(row.physical_shape(shape)) * (1 if row.block else itemsize)
