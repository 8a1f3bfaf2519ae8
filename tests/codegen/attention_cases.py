"""Attention over a KV cache, static or in pages, for the kernel tests of all targets."""

import numpy as np

from aotc.ir.builder import Builder
from aotc.ir.dtypes import i32
from aotc.ir.graph import TensorType
from aotc.ir.ops.decoder import AttentionAttrs, KVAttrs
from aotc.ir.sizes import Dim, symbol
from aotc.passes.layout_kv import KVLayout, layout_kv

SLOTS = 6


def attention_graph(dtype, heads, kv_heads, d, window, decode, context=80, rope=False):
    """Appends to a static cache, then attends; `decode`: one token a row."""
    tokens, rows = symbol("rows" if decode else "tokens"), symbol("rows")
    dims = (Dim("rows", 1, 6), Dim("slots", 1, 9), *(() if decode else (Dim("tokens", 1, 192),)))
    b = Builder(f"attention_{heads}_{kv_heads}_{d}", dims)
    cache = b.input("kv", TensorType(dtype, (symbol("slots"), 2, kv_heads, context, d)))
    q = b.input("q", TensorType(dtype, (tokens, heads, d)))
    k, v = (b.input(n, TensorType(dtype, (tokens, kv_heads, d))) for n in "kv"[:1] + "w")
    positions, owners = (b.input(n, TensorType(i32, (tokens,))) for n in ("positions", "rows"))
    query_start = b.input("query_start", TensorType(i32, (rows + 1,)))
    seq_lens, index = (b.input(n, TensorType(i32, (rows,))) for n in ("seq_lens", "kv_index"))
    if rope:
        cos, sin = (b.input(n, TensorType(dtype, (tokens, d))) for n in ("cos", "sin"))
        k = b.emit("rope", k, cos, sin)
    cache = b.emit("kv_append", cache, k, v, positions, owners, index, attrs=KVAttrs())
    attrs = AttentionAttrs("static", d**-0.5, window)
    out = b.emit("attention", q, cache, query_start, seq_lens, index, attrs=attrs)
    return b.finish({"out": out, "kv": cache}, (("kv", "kv"),))


def ragged(seq_lens, new):
    """Metadata of rows with `new` tokens each, out of `seq_lens`, in shuffled slots."""
    start = np.concatenate([[0], np.cumsum(new)])
    position = [p for length, n in zip(seq_lens, new, strict=True) for p in range(length - n, length)]
    return {
        "positions": np.array(position, np.int32),
        "rows": np.repeat(np.arange(len(new)), new).astype(np.int32),
        "query_start": start.astype(np.int32),
        "seq_lens": np.array(seq_lens, np.int32),
        "kv_index": np.array([4, 0, 5, 2], np.int32)[: len(new)],
    }


def page_up(graph, inputs, page_size):
    """(graph, inputs) with the caches in shuffled pages; None leaves both static. What no row has written is NaN, in
    either layout, and so are entries of the table that nobody may follow: they point far outside."""
    slots, lengths = inputs["kv_index"], inputs["seq_lens"]
    dense = np.full_like(inputs["kv"], np.nan)
    for slot, length in zip(slots, lengths, strict=True):
        dense[slot, :, :, :length] = inputs["kv"][slot, :, :, :length]
    if page_size is None:
        return graph, inputs | {"kv": dense}
    counts = -(-lengths // page_size)
    total = int(counts.sum()) + 2
    order = iter(np.random.default_rng(page_size).permutation(total))
    table = np.full((len(slots), -(-dense.shape[3] // page_size)), 1 << 28, np.int32)
    pages = np.full((total, *dense.shape[1:3], page_size, dense.shape[4]), np.nan, dense.dtype)
    for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        for n in range(count):
            table[row, n] = next(order)
            part = dense[slot, :, :, n * page_size : (n + 1) * page_size]
            pages[table[row, n], :, :, : part.shape[2]] = part
    return layout_kv(graph, KVLayout("paged", page_size)), inputs | {"kv": pages, "block_table": table}
