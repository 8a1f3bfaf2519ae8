"""Tiles by family, shape class and architecture. This is where a table of measured schedules goes; untuned so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.nest import power_of_two
from aotc.ir.dtypes import DType

SKINNY_ROWS = 64  # and up to here a block of the weight meets all rows at once
PROGRAMS = 132  # that fill a card: multiprocessors of an H100
POINTWISE_BLOCK = 1024
SAMPLE_CHUNK, SAMPLE_WARPS = 4096, 16  # logits that a program looks at at once
SAMPLE_PARTS = 32  # programs that look for the best logit of a row


@dataclass(frozen=True)
class Tile:
    """A tile of m rows times n columns, k elements deep a step."""

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 2


MEASURED = {
    "sm90 matvec 3072x2048x1": Tile(1, 4, 2048, 8),
}
"""What was faster on a device than the rules below, by architecture, family and shape."""


def matvec(arch: str, n: int, depth: int, parts: int) -> Tile:
    """Weights of a matvec in flight: about 64 a thread. Up to 4096 deep, a program holds whole rows in registers."""
    measured = MEASURED.get(f"{arch} matvec {n}x{depth}x{parts}")
    if measured is not None:
        return measured
    lanes = power_of_two(depth)
    if lanes <= 4096:
        columns = max(min(8192 // (lanes * parts), 4), 1)
        return Tile(1, min(columns, power_of_two(n)), lanes, 4 if lanes * parts * columns >= 4096 else 2)
    k = 2048 if depth * n > 1 << 25 else 1024
    return Tile(1, max(min(4096 // (k * parts), 2), 1), k)


def attention_decode(rows: int, kv_heads: int, group: int, head_dim: int, dtype: DType) -> tuple[int, Tile]:
    """(splits, tile): m queries of a group of heads, n keys a step, k lanes of a head. Enough programs for the card."""
    lanes = max(power_of_two(head_dim), 16)
    m = max(power_of_two(group), 16)
    if rows == 1:
        splits = max(min(power_of_two(PROGRAMS // kv_heads), 1024 // lanes), 1)
        tile = Tile(m, 128, lanes, 8) if lanes > 64 else Tile(m, 64, lanes, 4)
    else:
        splits = max(min(power_of_two(512 // (rows * kv_heads)), 16), 1)
        tile = Tile(m, min(max(4096 // lanes, 16), 64), lanes, 4)
    if dtype.itemsize > 2:  # f32 has no tensor cores: its products take registers instead
        tile = replace(tile, n=2048 // lanes if lanes > 64 else 32)
    return splits, tile


def skinny(arch: str, rows: int, n: int, depth: int, parts: int, dtype: DType) -> tuple[Tile, int]:
    """(tile, splits): n rows of the weight times all rows of x, k deep a step, in shares of the depth that together
    give every multiprocessor a program with all of its shared memory."""
    m, k = max(power_of_two(rows), 16), min(power_of_two(depth), 256 // dtype.itemsize)
    columns = min(max(power_of_two(n), 16), 64 if dtype.itemsize == 2 else 32)
    blocks = -(-n // columns)
    splits = max(min(PROGRAMS // blocks, depth // (4 * k)), 1)
    stage = (m + parts * columns) * k * dtype.itemsize
    return Tile(m, columns, k, 4, max(min(LIMITS[arch].shared_bytes * 9 // 10 // stage, 8), 1)), splits


def matmul(rows: int, n: int, depth: int, dtype: DType, parts: int, arch: str) -> Tile:
    """A tile of tensor-core work whose stages fit the shared memory of `arch`."""
    most = 128 if dtype.itemsize == 2 else 64  # f32 has no tensor cores: its products take registers instead
    m = min(max(power_of_two(rows), 16), most)
    columns = min(max(power_of_two(n), 16), most // parts)
    k = min(max(power_of_two(depth), 16), 128 // dtype.itemsize)
    stage = (m + parts * columns) * k * dtype.itemsize
    stages = max(min(LIMITS[arch].shared_bytes * 9 // 10 // stage, 4), 1)
    return Tile(m, columns, k, 8 if m * columns * parts >= 128 * 128 else 4, stages)


def attention(group: int, head_dim: int, dtype: DType, decode: bool) -> tuple[int, Tile]:
    """(tokens a program, tile): m queries (tokens times a group of heads), n keys a step, k lanes of a head.

    f32 has no tensor cores: its products take registers instead.
    """
    lanes = max(power_of_two(head_dim), 16)
    if dtype.itemsize > 2:
        tile = Tile(16, 32 if lanes > 64 else 64, lanes, 8 if lanes >= 128 else 4)
    else:
        tile = Tile(128, 64, lanes, 8, 3) if lanes > 64 else Tile(64, 128, lanes, 4, 2)
    tokens = 1 if decode else max(tile.m // group, 1)
    return tokens, replace(tile, m=max(power_of_two(tokens * group), 16))


def row_warps(width: int) -> int:
    """Warps for a row that one program holds."""
    return 1 if width <= 256 else 4 if width <= 2048 else 8
