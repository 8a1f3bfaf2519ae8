"""The first and the last kernel of a step: tokens that the host does not know come from where they were sampled to."""

import numpy as np

from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, f32, i32, u8
from aotc.ir.graph import TensorType
from aotc.ir.ops.shape import AxisAttrs
from aotc.ir.sizes import Dim, symbol
from aotc.runtime.sampling import SAMPLER_DTYPE, SamplingParams, fill_row

VOCAB, CONTEXT, WIDTH = 50, 12, 24


def feed_graph(most_rows=8):
    """Looks up the rows of a table that tokens name, and samples into the history that it took tokens from."""
    tokens, rows, slots = symbol("tokens"), symbol("rows"), symbol("slots")
    b = Builder("feed", (Dim("tokens", 1, 64), Dim("rows", 1, most_rows), Dim("slots", 1, 9)))
    fed = [b.input(n, TensorType(i32, (tokens,))) for n in ("tokens", "positions", "rows")]
    index = b.input("kv_index", TensorType(i32, (rows,)))
    table = b.input("table", TensorType(bf16, (VOCAB, WIDTH)))
    history = b.input("history", TensorType(i32, (slots, CONTEXT)))
    looked_up = b.emit("gather", table, b.emit("feed_tokens", *fed, index, history), attrs=AxisAttrs(0))
    logits, settings = b.input("logits", TensorType(f32, (rows, VOCAB))), b.input("sampler", TensorType(u8, (rows, 128)))
    token, *_, past = b.emit_many("sample", logits, settings, history, index)
    return b.finish({"x": looked_up, "token": token, "history": past}, (("history", "history"),))


def feed_inputs():
    """Rows of 1, 5, 1 and 3 tokens in slots 4, 0, 5 and 2; the host does not know those of the rows of one, and of the
    others it gives a token that the history does not have."""
    rng = np.random.default_rng(3)
    rows = np.repeat(np.arange(4), [1, 5, 1, 3]).astype(np.int32)
    positions = np.array([7, 0, 1, 2, 3, 4, 11, 5, 6, 7], np.int32)
    sampler = np.zeros(4, SAMPLER_DTYPE)
    for row, length in zip(sampler, (8, 5, 12, 8), strict=True):
        fill_row(row, SamplingParams(temperature=0.0), seed=0, prompt_len=1, history_len=length)
    tokens = np.where(np.isin(rows, (0, 2)), -1, rng.integers(0, VOCAB, 10)).astype(np.int32)
    return {
        "tokens": tokens, "positions": positions, "rows": rows, "kv_index": np.array([4, 0, 5, 2], np.int32),
        "table": rng.standard_normal((VOCAB, WIDTH)).astype(bf16.np), "sampler": sampler.view(np.uint8).reshape(4, 128),
        "history": rng.integers(0, VOCAB, (6, CONTEXT)).astype(np.int32),
        "logits": rng.standard_normal((4, VOCAB)).astype(np.float32),
    }  # fmt: skip
