"""Tiles by family, shape class and architecture. This is where a table of measured schedules goes; untuned so far."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.nest import power_of_two
from aotc.ir.dtypes import DType

MATVEC_ROWS = 4  # up to here a linear layer reads its weights with plain loads, above it multiplies tiles
POINTWISE_BLOCK = 1024
SAMPLE_CHUNK, SAMPLE_WARPS = 4096, 16  # logits that a row's program looks at at once


@dataclass(frozen=True)
class Tile:
    """A tile of m rows times n columns, k elements deep a step."""

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 2


def matvec(rows: int, n: int, depth: int, parts: int) -> Tile:
    """Partial sums of a matvec: about 4096 of them in the registers of four warps."""
    k = min(1024 // power_of_two(rows), power_of_two(depth))
    return Tile(rows, min(4 // parts if parts < 4 else 1, power_of_two(n)), k)


def matmul(rows: int, n: int, depth: int, dtype: DType, parts: int, arch: str) -> Tile:
    """A tile of tensor-core work whose stages fit the shared memory of `arch`."""
    m = min(max(power_of_two(rows), 16), 128)
    columns = min(max(power_of_two(n), 16), 64 if parts > 1 or m > 64 else 128)
    k = min(max(power_of_two(depth), 16), 128 // dtype.itemsize)
    stage = (m + parts * columns) * k * dtype.itemsize
    stages = max(min(LIMITS[arch].shared_bytes * 9 // 10 // stage, 4), 1)
    return Tile(m, columns, k, 8 if m * columns * parts >= 128 * 128 else 4, stages)


def attention(group: int, head_dim: int, dtype: DType, decode: bool) -> tuple[int, Tile]:
    """(tokens a program, tile): m queries (tokens times a group of heads), n keys a step, k lanes of a head.

    f32 has no tensor cores: its products take registers instead.
    """
    lanes = max(power_of_two(head_dim), 16)
    tokens = 1 if decode else max((64 if dtype.itemsize == 2 else 16) // group, 1)
    wide = lanes * dtype.itemsize > 256
    return tokens, Tile(max(power_of_two(tokens * group), 16), 32 if wide else 64, lanes, 8 if lanes >= 128 else 4)


def row_warps(width: int) -> int:
    """Warps for a row that one program holds."""
    return 1 if width <= 256 else 4 if width <= 2048 else 8
