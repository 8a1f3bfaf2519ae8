"""Renders attention of one new token a row as CUDA C++ for Hopper: keys and values come by tensor maps, on their way before
the queries are there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from aotc.codegen.cuda.frame import Source, TensorMap
from aotc.codegen.cuda.hopper import SYNTAX, source
from aotc.codegen.cuda.limits import LIMITS
from aotc.codegen.cuda.schedule import PROGRAMS, Heads
from aotc.codegen.cuda.tables import Family
from aotc.codegen.loops import LoopNest
from aotc.ir.dtypes import f32

if TYPE_CHECKING:
    from aotc.codegen.cuda.attention import DecodeStep

KEYS = 16  # of a unit: those of a page at least
MOST_GROUP = 8  # heads that share a key: rows of a product that are not wasted
HEAD_DIMS = (64, 128)  # with more, a thread's share of the sums does not fit its registers
SHARED_BYTES = 228 << 10  # of a multiprocessor, of which each block takes 1 KB besides its own
WARP_UNITS = 6  # of a row, before another block shares it: to meet takes as long
ANY_ROWS = (1 << 31) - 1  # of a cache, whose blocks are counted when it is made


@dataclass(frozen=True)
class Tile:
    """Warps of a block, units of keys and values on their way to each, blocks that share the keys of a long row. Raises
    ValueError for what the template does not take."""

    warps: int
    units: int
    splits: int

    def __post_init__(self) -> None:
        for name, most in (("warps", 16), ("units", 64), ("splits", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)} is not supported")

    def shared_bytes(self, of: Heads) -> int:
        """Aligned rings, which hold the sums in the end, statistics of sums, queries, barriers, a flag."""
        ring = self.units * (2 * KEYS * of.head_dim * 2 + 8)
        return 1024 + self.warps * (ring + of.group * 2 * 4) + of.group * of.head_dim * 2 + 16


def takes(step: DecodeStep) -> bool:
    """Whether this template computes a step: more than one row of 16-bit floats, whole units of keys, queries and keys
    without sums over a head."""
    of, cache = step.shape, step.cache
    if step.frame.setting.arch != "sm90" or of.tokens == 1 or of.dtype.itemsize != 2:
        return False
    if of.group > MOST_GROUP or of.head_dim not in HEAD_DIMS or cache.tokens % KEYS or cache.stride % of.head_dim:
        return False
    others = [n for n in step.body.nodes if n not in (step.attention, step.append)]
    floats = {v.type.dtype.name for n in others for v in n.outputs} <= {"f32", "f16", "bf16", "bool"}
    return floats and not {n.op for n in others} & {"reduce", "arg_reduce", "dot_general"}


def rule(arch: str, of: Heads) -> Tile:
    """One block a multiprocessor where those that do not split keys are no more, else two; so many splits that there are no
    more blocks than fit at once. Eight warps where each has at least three units on their way, else four."""
    heads = of.tokens * of.kv_heads
    blocks = 1 if heads <= PROGRAMS else 2
    splits = max(min(blocks * PROGRAMS // heads, 16), 1)
    tiles = [_filled(of, warps, splits, SHARED_BYTES // blocks - 1024) for warps in (8, 4)]
    return tiles[0] if tiles[0].units >= 3 else tiles[1]


def _filled(of: Heads, warps: int, splits: int, shared_bytes: int) -> Tile:
    """With as many units as fit."""
    one, two = (Tile(warps, units, splits).shared_bytes(of) for units in (1, 2))
    return Tile(warps, max((shared_bytes - one) // (two - one) + 1, 1), splits)


def candidates(arch: str, of: Heads) -> Iterator[Tile]:
    """Half and twice the splits, four and eight warps, the shared memory for one block a multiprocessor, two and three."""
    splits = rule(arch, of).splits
    for shares, warps, blocks in product((splits, max(splits // 2, 1), min(2 * splits, 16)), (4, 8), (1, 2, 3)):
        yield _filled(of, warps, shares, SHARED_BYTES // blocks - 1024)


def _wrong(of: Heads, tile: Tile) -> str:
    most = LIMITS["sm90"].shared_bytes
    return f"it takes {tile.shared_bytes(of)} bytes of shared memory of {most}" if tile.shared_bytes(of) > most else ""


FLASH_DECODE = Family("flash_decode", Tile, rule, candidates, _wrong)


def flash_decode(step: DecodeStep) -> Source:
    """The source of a step."""
    frame, of, rows = step.frame, step.shape, step.rows
    tile, heads = FLASH_DECODE.choose(frame.setting, of), of.group * of.kv_heads
    nest = LoopNest(step.body, SYNTAX, frame.pointers)
    with nest.scope("t", "head", "c") as asked:
        query = SYNTAX.stored(of.dtype, nest.emit(step.query, ("t", "head", "c")))
    with nest.scope("t", "kv_head", "c") as made:
        key, value = (SYNTAX.stored(of.dtype, nest.emit(v, ("t", "kv_head", "c"))) for v in (step.key, step.value))
    shared, shares = tile.shared_bytes(of), tile.splits if tile.splits > 1 else 0
    box = TensorMap(frame.arguments.index(step.kv), of.dtype.name, ANY_ROWS, of.head_dim, KEYS, of.head_dim // 64)
    return source(
        frame, "flash_decode", (rows, of.kv_heads, tile.splits), tile.warps, 1, shared, (box,),
        scratch_bytes=rows * (heads * shares * (of.head_dim + 2) * 4) if shares else 0,
        counter_bytes=rows * (of.kv_heads * 4) if shares else 0,
        tile=tile, warp_units=WARP_UNITS, cache=step.cache, element=of.dtype.name,
        resident=min(SHARED_BYTES // (shared + 1024), 2), d=of.head_dim, group=of.group, heads=heads,
        kv_heads=of.kv_heads, rows=SYNTAX.size(rows), max_rows=frame.upper(rows),
        seq_lens=frame.pointers[step.seq_lens], window=of.window, out=step.out,
        scale=SYNTAX.constant(step.attention.attrs.scale * math.log2(math.e), f32),
        lines=(nest.scopes[0].lines, asked.lines, made.lines), query=query, key=key, value=value,
    )  # fmt: skip
