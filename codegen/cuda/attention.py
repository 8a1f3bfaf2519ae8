"""Renders what touches the KV cache: appending, attention over ragged rows, both at once for one token a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aotc.codegen.cuda import flash_decode, schedule
from aotc.codegen.cuda.frame import SYNTAX, Frame, Source, only, slot_stride
from aotc.codegen.cuda.nest import power_of_two
from aotc.codegen.cuda.syntax import STORAGE
from aotc.codegen.loops import to_primitives
from aotc.ir.dtypes import f32
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.sizes import Size, ceildiv


@dataclass(frozen=True)
class Cache:
    """What templates must know of a layer's cache to address it, see cache.j2. A block is a page, or a sequence where
    `pages` (entries of a row of the block table) is 0. `stride` and `values` (from a key to its value) are elements."""

    kv: str
    index: str
    pages: int
    tokens: int
    d: int
    stride: int
    values: int


def cache_of(frame: Frame, kv: Value, index: Value) -> Cache:
    _, _, heads, tokens, d = (frame.upper(s) for s in kv.type.shape)
    pages = frame.upper(index.type.shape[1]) if index.type.rank == 2 else 0
    return Cache(frame.pointers[kv], frame.pointers[index], pages, tokens, d, slot_stride(frame, kv), heads * tokens * d)


def kv_append(frame: Frame) -> Source:
    body = to_primitives(frame.body)
    node = only(body, "kv_append")
    kv, k, v, positions, rows, index = node.inputs
    nest = frame.nest(body, wide=False)
    tokens, heads, d = (k.type.shape[0], *(frame.upper(s) for s in k.type.shape[1:]))
    lanes = power_of_two(d)
    block = max(schedule.POINTWISE_BLOCK // lanes, 1)
    nest.vector("t", block, "live")
    nest.vector("c", lanes, "live_c" if lanes > d else "")
    nest.vectors["place"] = nest.axes("t")
    nest.scopes[0].variables |= {"t", "h", "c", "place"}
    for value, start in ((k, "place"), (v, f"place + {heads * frame.upper(kv.type.shape[3]) * d}")):
        name = nest.emit(value, ("t", "h", "c"))
        nest.line(nest.syntax.store("keys", kv.type.dtype, f"({start} + c)", name, nest.mask("t", "c")))
    return frame.source(
        "kv_append", (ceildiv(tokens, block), heads, 1), 4, tokens=SYNTAX.size(tokens), cache=cache_of(frame, kv, index),
        positions=frame.pointers[positions], owners=frame.pointers[rows], block=block, lanes=lanes, d=d,
        lines=nest.scopes[0].lines,
    )  # fmt: skip


@dataclass(frozen=True)
class DecodeStep:
    """Attention of one new token a row, as templates take it: its keys and values go into the cache, and its queries see
    them and all older ones."""

    frame: Frame
    body: Graph
    attention: Node
    append: Node

    @classmethod
    def of(cls, frame: Frame) -> DecodeStep:
        body = to_primitives(frame.body)
        return cls(frame, body, only(body, "attention"), only(body, "kv_append"))

    @property
    def query(self) -> Value:
        return self.attention.inputs[0]

    @property
    def seq_lens(self) -> Value:
        return self.attention.inputs[3]

    @property
    def kv(self) -> Value:
        return self.append.inputs[0]

    @property
    def key(self) -> Value:
        return self.append.inputs[1]

    @property
    def value(self) -> Value:
        return self.append.inputs[2]

    @property
    def rows(self) -> Size:
        return self.query.type.shape[0]

    @property
    def out(self) -> str:
        return self.frame.pointers[self.frame.body.outputs[0]]

    @property
    def cache(self) -> Cache:
        return cache_of(self.frame, self.kv, self.attention.inputs[4])

    @property
    def shape(self) -> schedule.Heads:
        """What its schedule depends on."""
        frame, (_, heads, d) = self.frame, self.query.type.shape
        kv_heads, most = frame.upper(self.kv.type.shape[2]), frame.widest().upper(self.rows)
        return schedule.Heads(
            most, kv_heads, frame.upper(heads) // kv_heads, frame.upper(d), self.kv.type.dtype,
            self.attention.attrs.window or 0, paged=self.attention.inputs[4].type.rank == 2,
        )  # fmt: skip


def attention_decode(frame: Frame) -> Source:
    step = DecodeStep.of(frame)
    return flash_decode.flash_decode(step) if flash_decode.takes(step) else _attention_decode(step)


def _attention_decode(step: DecodeStep) -> Source:
    frame, shape, rows = step.frame, step.shape, step.rows
    tile = schedule.ATTENTION_DECODE.choose(frame.setting, shape)
    d, kv_heads, splits, heads = shape.head_dim, shape.kv_heads, tile.splits, shape.kv_heads * shape.group
    nest = frame.nest(step.body, wide=False)
    nest.vector("m", tile.m, "asked")
    nest.vector("d", tile.k, "live_d" if tile.k > d else "")
    nest.vectors["head"] = nest.axes("m")
    nest.scopes[0].variables |= {"t", "m", "d", "head", "kv_head"}
    names = {"query": nest.emit(step.query, ("t", "head", "d"))}
    names |= {"key": nest.emit(step.key, ("t", "kv_head", "d")), "value": nest.emit(step.value, ("t", "kv_head", "d"))}
    partial = 0 if splits == 1 else rows * (heads * splits * (d + 2) * 4)
    return frame.source(
        "attention_decode", (rows, kv_heads, splits), tile.num_warps, tile.num_stages,
        scratch_bytes=partial, counter_bytes=0 if splits == 1 else rows * (kv_heads * 4),
        cache=step.cache, seq_lens=frame.pointers[step.seq_lens],
        out=step.out, rows=SYNTAX.size(rows), max_rows=frame.upper(rows), heads=heads,
        kv_heads=kv_heads, group=shape.group, d=d, splits=splits, lanes=power_of_two(shape.group), tile=tile, names=names,
        window=shape.window, scale=SYNTAX.literal(step.attention.attrs.scale * math.log2(math.e), f32),
        storage=STORAGE[shape.dtype.name], lines=nest.scopes[0].lines,
    )  # fmt: skip


def attention(frame: Frame) -> Source:
    body = to_primitives(frame.body)
    node = only(body, "attention")
    query, kv, query_start, seq_lens, index = node.inputs
    tokens, rows = query.type.shape[0], seq_lens.type.shape[0]
    heads, d = (frame.upper(s) for s in query.type.shape[1:])
    kv_heads = frame.upper(kv.type.shape[2])
    group = heads // kv_heads
    shape = schedule.Heads(
        frame.widest().upper(tokens), kv_heads, group, d, kv.type.dtype, node.attrs.window or 0, decode=tokens == rows,
        paged=index.type.rank == 2,
    )  # fmt: skip
    tile = schedule.ATTENTION.choose(frame.setting, shape)
    queries = schedule.queries(shape, tile)
    tiles = (tokens + rows * (queries - 1)) // queries
    nest = frame.nest(body, wide=False)
    nest.vector("m", tile.m, "asked")
    nest.vector("d", tile.k, "live_d" if tile.k > d else "")
    nest.vectors |= {"token": nest.axes("m"), "head": nest.axes("m")}
    nest.scopes[0].variables |= {"m", "d", "token", "head", "kv_head"}
    name = nest.emit(query, ("token", "head", "d"))
    return frame.source(
        "attention", (tiles, kv_heads, 1), tile.num_warps, tile.num_stages, query=name, lines=nest.scopes[0].lines,
        query_start=frame.pointers[query_start], seq_lens=frame.pointers[seq_lens], cache=cache_of(frame, kv, index),
        out=frame.pointers[frame.body.outputs[0]], rows=SYNTAX.size(rows), max_rows=power_of_two(frame.upper(rows)),
        heads=heads, kv_heads=kv_heads, group=group, d=d, queries=queries, tile=tile,
        window=node.attrs.window or 0, scale=SYNTAX.literal(node.attrs.scale * math.log2(math.e), f32),
        storage=STORAGE[kv.type.dtype.name],
    )  # fmt: skip
