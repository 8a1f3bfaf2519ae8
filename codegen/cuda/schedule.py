"""Families of kernels whose tiles are chosen: their shape classes, rules of thumb, and what `aotc tune` tries.

`aotc.codegen.cuda.tables` asks the tables first. A family is a row at the end of this file, or beside its template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.nest import power_of_two
from aotc.codegen.cuda.tables import Family
from aotc.ir.dtypes import DType

SKINNY_ROWS = 64  # up to here a block of the weight meets all rows at once
PROGRAMS = 132  # that fill a card: multiprocessors of an H100
POINTWISE_BLOCK = 1024
SAMPLE_CHUNK, SAMPLE_WARPS = 4096, 16  # logits that a program looks at at once


@dataclass(frozen=True)
class Tile:
    """A tile of m rows times n columns, k elements deep a step; shares of the depth, or of the keys, that different
    programs take. Raises ValueError for sizes that Triton does not take."""

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 2
    splits: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1 or (field.name not in ("num_stages", "splits") and value & (value - 1)):
                raise ValueError(f"{field.name} = {value} is no power of two")


@dataclass(frozen=True)
class Linear:
    """A linear layer: rows of x at most, columns of the output, depth; 2 parts for a gated one; whether it normalises
    x first; how many neighbouring columns of the output it adds up squares of."""

    rows: int
    n: int
    depth: int
    parts: int
    dtype: DType
    norm: bool = False
    squares: int = 1

    def __str__(self) -> str:
        squares = f" squares {self.squares}" if self.squares > 1 else ""
        return f"{self.rows} {self.n}x{self.depth}x{self.parts} {self.dtype.name}{' norm' * self.norm}{squares}"

    def stage_bytes(self, tile: Tile) -> int:
        """Shared memory of a stage: a block of x, and of each part of the weight."""
        return (tile.m + self.parts * tile.n) * tile.k * self.dtype.itemsize


@dataclass(frozen=True)
class Heads:
    """Attention: tokens (rows where each has one) at most, groups of query heads that share a key, lanes of a head;
    whether keys lie in pages."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: DType
    window: int = 0
    decode: bool = False
    paged: bool = False

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        heads = f"{self.kv_heads}x{self.group}x{self.head_dim}"
        return f"{self.tokens} {heads} {self.dtype.name}{window}{' decode' * self.decode}{' paged' * self.paged}"

    @property
    def lanes(self) -> int:
        return max(power_of_two(self.head_dim), 16)


def matvec(arch: str, of: Linear) -> Tile:
    """Weights of a matvec in flight: about 64 a thread. Up to 4096 deep, a program holds whole rows in registers."""
    lanes = power_of_two(of.depth)
    if lanes <= 4096:
        columns = max(min(8192 // (lanes * of.parts), 4), 1)
        return Tile(1, min(columns, power_of_two(of.n)), lanes, 4 if lanes * of.parts * columns >= 4096 else 2)
    k = 2048 if of.depth * of.n > 1 << 25 else 1024
    return Tile(1, max(min(4096 // (k * of.parts), 2), 1), k)


def matvec_candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """8 to 128 weights a thread, of whole rows where they fit."""
    lanes = power_of_two(of.depth)
    depths = dict.fromkeys([min(lanes, 4096), min(lanes, 2048), min(lanes, 1024), min(lanes, 512)])
    for k, n, warps in product(depths, (1, 2, 4, 8, 16), (2, 4, 8)):
        if 8 <= n * k * of.parts // (32 * warps) <= 128 and n <= power_of_two(of.n) and (n * k >= 2048 or k == lanes):
            yield Tile(1, n, k, warps)


def skinny(arch: str, of: Linear) -> Tile:
    """n rows of the weight times all rows of x, k deep a step, in shares of the depth that together give every
    multiprocessor a program with all of its shared memory."""
    size = of.dtype.itemsize
    k = min(max(power_of_two(of.depth), 16), 256 // size)
    columns = min(max(power_of_two(of.n), 16), 64 if size == 2 else 32)
    splits = max(min(PROGRAMS // -(-of.n // columns), of.depth // (4 * k)), 1)
    return _staged(arch, of, Tile(max(power_of_two(of.rows), 16), columns, k, 4, 8, splits))


def skinny_candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """Narrow and wide tiles, each in shares of the depth for half a card, one and two."""
    size, m = of.dtype.itemsize, max(power_of_two(of.rows), 16)
    most = max(power_of_two(of.n), 16)
    for n, k, warps in product((16, 32, 64, 128), (128 // size, 256 // size, 512 // size), (4, 8)):
        if n > most or k > max(power_of_two(of.depth), 16) or (warps == 8) != (m * n * of.parts > 4096):
            continue
        blocks = -(-of.n // n)
        for programs in (PROGRAMS // 2, PROGRAMS, 2 * PROGRAMS):
            splits = max(min(programs // blocks, of.depth // (2 * k)), 1)
            yield _staged(arch, of, Tile(m, n, k, warps, 8, splits))


def matmul(arch: str, of: Linear) -> Tile:
    """A tile of tensor-core work whose stages fit the shared memory of `arch`."""
    size = of.dtype.itemsize
    most = 128 if size == 2 else 64  # f32 has no tensor cores: its products take registers instead
    m = min(max(power_of_two(of.rows), 16), most)
    columns = min(max(power_of_two(of.n), 16), most // of.parts)
    k = min(max(power_of_two(of.depth), 16), 128 // size)
    return _staged(arch, of, Tile(m, columns, k, 8 if m * columns * of.parts >= 128 * 128 else 4, 4))


def matmul_candidates(arch: str, of: Linear) -> Iterator[Tile]:
    """Tiles of 64 x 64 to 128 x 256 sums, in as many warps as hold those in 32 to 128 registers a thread."""
    size = of.dtype.itemsize
    for m, n, k, stages in product((64, 128), (64, 128, 256), (64 // size, 128 // size), (3, 4)):
        sums = m * n * of.parts
        if sums > 128 * (256 if size == 2 else 32):
            continue
        if n > max(power_of_two(of.n), 16) or k > max(power_of_two(of.depth), 16):
            continue
        for warps in (4, 8):
            if m <= max(power_of_two(of.rows), 16) and 32 <= sums // (32 * warps) <= 128:
                tile = _staged(arch, of, Tile(m, n, k, warps, stages))
                if tile.num_stages == stages:
                    yield tile


def _staged(arch: str, of: Linear, tile: Tile) -> Tile:
    """The tile with as many stages as fit the shared memory, at most its own."""
    stages = LIMITS[arch].shared_bytes * 9 // 10 // of.stage_bytes(tile)
    return replace(tile, num_stages=max(min(stages, tile.num_stages), 1))


def attention_decode(arch: str, of: Heads) -> Tile:
    """m queries of a group of heads, n keys a step, k lanes of a head. Splits make enough programs for the card."""
    lanes, m = of.lanes, max(power_of_two(of.group), 16)
    if of.tokens == 1:
        splits = max(min(power_of_two(PROGRAMS // of.kv_heads), 1024 // lanes), 1)
        tile = Tile(m, 128, lanes, 8, splits=splits) if lanes > 64 else Tile(m, 64, lanes, 4, splits=splits)
    else:
        splits = max(min(power_of_two(512 // (of.tokens * of.kv_heads)), 16), 1)
        tile = Tile(m, min(max(4096 // lanes, 16), 64), lanes, 4, splits=splits)
    if of.dtype.itemsize > 2:  # f32 has no tensor cores: its products take registers instead
        tile = replace(tile, n=2048 // lanes if lanes > 64 else 32)
    return tile


def attention_decode_candidates(arch: str, of: Heads) -> Iterator[Tile]:
    """The rule's splits, half and twice as many; 16 to 128 keys a step."""
    rule = attention_decode(arch, of)
    most = max(min(2 * rule.splits, 1024 // of.lanes), 1)
    for splits in dict.fromkeys([rule.splits, max(rule.splits // 2, 1), most]):
        for n, warps in product((16, 32, 64, 128), (4, 8)):
            if 1024 <= n * of.lanes * of.dtype.itemsize // 2 <= 16384:
                yield replace(rule, n=n, num_warps=warps, splits=splits)


def attention(arch: str, of: Heads) -> Tile:
    """m queries (tokens times a group of heads), n keys a step, k lanes of a head."""
    lanes = of.lanes
    if of.dtype.itemsize > 2:  # as above
        tile = Tile(16, 32 if lanes > 64 else 64, lanes, 8 if lanes >= 128 else 4)
    else:
        tile = Tile(128, 64, lanes, 8, 3) if lanes > 64 else Tile(64, 128, lanes, 4, 2)
    return replace(tile, m=max(power_of_two(queries(of, tile) * of.group), 16))


def attention_candidates(arch: str, of: Heads) -> Iterator[Tile]:
    """Blocks of 16 to 128 queries; two or three stages."""
    for m, n, stages in product((16, 32, 64, 128), (32, 64, 128), (2, 3)):
        if m < of.group or (of.decode and m != max(power_of_two(of.group), 16)) or n * of.lanes > 8192:
            continue
        for warps in (4, 8):
            if m * n * of.dtype.itemsize <= 8192 * warps and (warps == 4 or m >= 64):
                yield Tile(m, n, of.lanes, warps, stages)


def queries(of: Heads, tile: Tile) -> int:
    """Tokens that a program of `attention` takes."""
    return 1 if of.decode else max(tile.m // of.group, 1)


def _one_row(of: Linear, tile: Tile) -> str:
    return "" if tile.m == 1 else "m must be 1"


def _all_rows(of: Linear, tile: Tile) -> str:
    if tile.m < max(of.rows, 16):
        return f"m must be at least {max(of.rows, 16)}"
    return f"n must be a multiple of {of.squares}, whose squares are added up" if tile.n % of.squares else ""


def _blocks(of: Linear, tile: Tile) -> str:
    return "" if min(tile.m, tile.n, tile.k) >= 16 else "m, n and k must be at least 16"


def _whole_head(of: Heads, tile: Tile) -> str:
    if tile.k != of.lanes:
        return f"k must be {of.lanes}, the lanes of a head"
    if tile.m < max(of.group, 16):
        return f"m must be at least {max(of.group, 16)}, the heads of a group"
    return "splits must be a power of two" if tile.splits & (tile.splits - 1) else ""


def _fewer_rows(of: Linear) -> Iterator[Linear]:
    """The same layer with half as many rows, again and again: a tile that is good for many rows is good for more."""
    while of.rows >= 2 * 128:
        of = replace(of, rows=of.rows // 2)
        yield of


def _fewer_tokens(of: Heads) -> Iterator[Heads]:
    while of.tokens >= 2 * 128:
        of = replace(of, tokens=of.tokens // 2)
        yield of


def sample_parts(rows: int) -> int:
    """Programs that look for the best logit of a row: two a multiprocessor in all."""
    return max(min(power_of_two(2 * PROGRAMS // rows + 1) // 2, 32), 1)


def row_warps(width: int) -> int:
    """Warps for a row that one program holds."""
    return 1 if width <= 256 else 4 if width <= 2048 else 8


MATVEC = Family("matvec", Tile, matvec, matvec_candidates, _one_row)
SKINNY = Family("skinny", Tile, skinny, skinny_candidates, _all_rows)
MATMUL = Family("matmul", Tile, matmul, matmul_candidates, _blocks, _fewer_rows)
ATTENTION = Family("attention", Tile, attention, attention_candidates, _whole_head, _fewer_tokens)
ATTENTION_DECODE = Family("attention_decode", Tile, attention_decode, attention_decode_candidates, _whole_head)
