"""Renders what touches the KV cache: appending, attention over ragged rows, both at once for one token a row."""

from __future__ import annotations

import math

from aotc.codegen.cuda import schedule
from aotc.codegen.cuda.frame import SYNTAX, Frame, Source, only, require_static, slot_stride
from aotc.codegen.cuda.nest import power_of_two
from aotc.codegen.cuda.syntax import STORAGE
from aotc.codegen.loops import to_primitives
from aotc.ir.dtypes import f32


def kv_append(frame: Frame) -> Source:
    body = to_primitives(frame.body)
    node = only(body, "kv_append")
    require_static(node)
    kv, k, v, positions, rows, index = node.inputs
    nest = frame.nest(body, wide=False)
    tokens, heads, d = k.type.shape
    context = kv.type.shape[3]
    nest.scopes[0].variables |= {"t", "h", "place"}
    c = nest.block(SYNTAX.size(d))
    for value, start in ((k, "place"), (v, f"place + {heads * context * d}")):
        name = nest.emit(value, ("t", "h", c))
        nest.line(nest.syntax.store(frame.pointers[kv], kv.type.dtype, f"({start} + {c})", name, nest.mask(c)))
    return frame.source(
        "kv_append", (tokens, heads, 1), 1, tokens=SYNTAX.size(tokens), d=d, context=context,
        slot_stride=slot_stride(frame, kv), positions=frame.pointers[positions], rows=frame.pointers[rows],
        index=frame.pointers[index], lines=nest.scopes[0].lines,
    )  # fmt: skip


def attention_decode(frame: Frame) -> Source:
    """One new token a row: its keys and values go into the cache, and its queries see them and all older ones."""
    body = to_primitives(frame.body)
    node, append = only(body, "attention"), only(body, "kv_append")
    require_static(node)
    query, seq_lens, index = node.inputs[0], node.inputs[3], node.inputs[4]
    kv, k, v = append.inputs[:3]
    rows, heads, d = (frame.upper(s) for s in query.type.shape)
    kv_heads, context = (frame.upper(s) for s in kv.type.shape[2:4])
    group = heads // kv_heads
    splits, tile = schedule.attention_decode(rows, kv_heads, group, d, kv.type.dtype)
    nest = frame.nest(body, wide=False)
    nest.vector("m", tile.m, "asked")
    nest.vector("d", tile.k, "live_d" if tile.k > d else "")
    nest.vectors["head"] = nest.axes("m")
    nest.scopes[0].variables |= {"t", "m", "d", "head", "kv_head"}
    names = {"query": nest.emit(query, ("t", "head", "d"))}
    names |= {"key": nest.emit(k, ("t", "kv_head", "d")), "value": nest.emit(v, ("t", "kv_head", "d"))}
    partial = 0 if splits == 1 else query.type.shape[0] * (heads * splits * (d + 2) * 4)
    return frame.source(
        "attention_decode", (query.type.shape[0], kv_heads, splits), tile.num_warps, tile.num_stages,
        scratch_bytes=partial, counter_bytes=0 if splits == 1 else query.type.shape[0] * (kv_heads * 4),
        kv=frame.pointers[kv], seq_lens=frame.pointers[seq_lens], index=frame.pointers[index],
        out=frame.pointers[frame.body.outputs[0]], rows=SYNTAX.size(query.type.shape[0]), max_rows=rows, heads=heads,
        kv_heads=kv_heads, group=group, context=context, d=d, splits=splits, lanes=power_of_two(group), tile=tile, names=names,
        window=node.attrs.window or 0, scale=SYNTAX.literal(node.attrs.scale * math.log2(math.e), f32),
        storage=STORAGE[kv.type.dtype.name], slot_stride=slot_stride(frame, kv), lines=nest.scopes[0].lines,
    )  # fmt: skip


def attention(frame: Frame) -> Source:
    node = only(frame.body, "attention")
    require_static(node)
    q, kv, query_start, seq_lens, index = (frame.pointers[v] for v in node.inputs)
    cache = node.inputs[1].type
    tokens = node.inputs[0].type.shape[0]
    heads, d = (frame.upper(s) for s in node.inputs[0].type.shape[1:])
    kv_heads, context = (frame.upper(s) for s in cache.shape[2:4])
    rows = node.inputs[3].type.shape[0]
    group = heads // kv_heads
    queries, tile = schedule.attention(group, d, cache.dtype, decode=tokens == rows)
    tiles = (tokens + rows * (queries - 1)) // queries
    return frame.source(
        "attention", (tiles, kv_heads, 1), tile.num_warps, tile.num_stages, q=q, kv=kv, query_start=query_start,
        seq_lens=seq_lens, index=index,
        out=frame.pointers[node.out], rows=SYNTAX.size(rows), max_rows=power_of_two(frame.upper(rows)), heads=heads,
        kv_heads=kv_heads, group=group, context=context, d=d, queries=queries, tile=tile,
        window=node.attrs.window or 0, scale=SYNTAX.literal(node.attrs.scale * math.log2(math.e), f32),
        storage=STORAGE[cache.dtype.name], slot_stride=slot_stride(frame, node.inputs[1]),
    )  # fmt: skip


