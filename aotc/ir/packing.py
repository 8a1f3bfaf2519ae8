"""Physical layouts of tensors, one row a packing.

Quantised formats are GGML's (ggml-common.h): blocks of 32 weights along the last axis.
  q8_0: f16 scale d, 32 x i8            w = d q
  q4_0: f16 scale d, 16 bytes           w = d (q - 8); byte i holds weights i (low bits) and i + 16 (high bits)
  q4_1: f16 scale d, f16 m, 16 bytes    w = d q + m
Layouts of matmul weights [N, K] for CPUs keep the element type: 16 rows of N side by side for each step of K.
  n16k1: [ceil(N / 16), K, 16]          n16k2: [ceil(N / 16), ceil(K / 2), 16, 2], zero padded
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """`unpack` takes the physical array (and the logical shape) to the logical one, `pack` the other way.

    `block` and `block_bytes` are those of quantised formats, 0 elsewhere.
    """

    name: str
    physical_shape: Callable[[Shape], Shape]
    unpack: Callable[[np.ndarray, Shape], np.ndarray]
    pack: Callable[[np.ndarray], np.ndarray] | None = None
    block: int = 0
    block_bytes: int = 0


def _blocks(name: str, block_bytes: int, weights: Callable[[np.ndarray], np.ndarray]) -> Packing:
    def physical(shape: Shape) -> Shape:
        return (*shape[:-1], shape[-1] // 32, block_bytes)

    def unpack(blocks: np.ndarray, shape: Shape) -> np.ndarray:
        return weights(blocks.reshape(-1, block_bytes)).reshape(shape)

    return Packing(name, physical, unpack, None, 32, block_bytes)


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    packed = blocks[:, at : at + 16]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * np.ascontiguousarray(blocks[:, 2:34]).view(np.int8).astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * (_nibbles(blocks, 2) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * _nibbles(blocks, 4) + _f16(blocks, 2)


def _columns(step: int) -> Packing:
    def physical(shape: Shape) -> Shape:
        n, k = shape
        return (-(-n // 16), k, 16) if step == 1 else (-(-n // 16), -(-k // step), 16, step)

    def pack(x: np.ndarray) -> np.ndarray:
        n, k = x.shape
        if n % 16 or k % step:
            x = np.pad(x, ((0, -n % 16), (0, -k % step)))
        tiles = x.reshape(-(-n // 16), 16, -(-k // step), step).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(tiles).reshape(physical((n, k)))

    def unpack(tiles: np.ndarray, shape: Shape) -> np.ndarray:
        n, k = shape
        blocks, steps = -(-n // 16), -(-k // step)
        dense = tiles.reshape(blocks, steps, 16, step).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(dense.reshape(blocks * 16, steps * step)[:n, :k])

    return Packing(f"n16k{step}", physical, unpack, pack)


PACKINGS: dict[str, Packing] = {
    p.name: p
    for p in (_blocks("q8_0", 34, _q8_0), _blocks("q4_0", 18, _q4_0), _blocks("q4_1", 20, _q4_1), _columns(1), _columns(2))
}


def physical_bytes(packing: str, shape: Shape, itemsize: int) -> int:
    """Bytes of a packed tensor; blocks of quantised formats are bytes themselves."""
    row = PACKINGS[packing]
    return math.prod(row.physical_shape(shape)) * (1 if row.block else itemsize)
