"""Paged caches say what static ones say: the interpreter on ragged batches, with pages in any order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotc.ir.builder import Builder
from aotc.ir.dtypes import f32, i32
from aotc.ir.graph import TensorType
from aotc.ir.interpret import interpret
from aotc.ir.ops.decoder import AttentionAttrs, KVAttrs
from aotc.ir.sizes import Dim, symbol
from aotc.ir.text import parse_graph
from aotc.ir.verify import verify
from aotc.passes.layout_kv import KVLayout, layout_kv
from aotc.passes.runner import run_passes

CONTEXT, HEADS, KV_HEADS, D = 70, 4, 2, 8


def decoder_graph(layers=2, window=None):
    """kv_append and attention of some layers over static caches, each on the one before it."""
    tokens, rows = symbol("tokens"), symbol("rows")
    b = Builder("attention", (Dim("tokens", 1, 200), Dim("rows", 1, 8), Dim("slots", 1, 8)))
    x = b.input("q", TensorType(f32, (tokens, HEADS, D)))
    k, v = (b.input(n, TensorType(f32, (tokens, KV_HEADS, D))) for n in "kv")
    positions, owners = (b.input(n, TensorType(i32, (tokens,))) for n in ("positions", "rows"))
    query_start = b.input("query_start", TensorType(i32, (rows + 1,)))
    seq_lens, index = (b.input(n, TensorType(i32, (rows,))) for n in ("seq_lens", "kv_index"))
    caches = {}
    for n in range(layers):
        cache = b.input(f"kv.{n}", TensorType(f32, (symbol("slots"), 2, KV_HEADS, CONTEXT, D)))
        cache = b.emit("kv_append", cache, k, v, positions, owners, index, attrs=KVAttrs())
        x = b.emit("attention", x, cache, query_start, seq_lens, index, attrs=AttentionAttrs("static", D**-0.5, window))
        caches[f"kv.{n}"] = cache
    return b.finish({"out": x, **caches}, tuple((n, n) for n in caches))


@st.composite
def batches(draw):
    """(tokens in the cache afterwards, new ones) of each row."""
    rows = draw(st.integers(1, 5))
    lengths = [draw(st.integers(1, CONTEXT)) for _ in range(rows)]
    return lengths, [draw(st.integers(1, n)) for n in lengths]


def inputs_of(graph, lengths, new, rng):
    tokens = sum(new)
    arrays = {
        "positions": np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, new, strict=True)]),
        "rows": np.repeat(np.arange(len(new)), new), "query_start": np.cumsum([0, *new]), "seq_lens": np.array(lengths),
        "kv_index": rng.permutation(len(new) + 2)[: len(new)],
    }  # fmt: skip
    made = {k: v.astype(np.int32) for k, v in arrays.items()}
    for v in graph.inputs:
        if v.name not in made:
            shape = [{"tokens": tokens, "slots": len(new) + 2}.get(str(s), s) for s in v.type.shape]
            made[v.name] = rng.standard_normal(shape).astype(np.float32)
    return made


def paged_inputs(static, graph, size, rng):
    """The same batch in shuffled pages; what no sequence has written is NaN."""
    lengths, max_pages = static["seq_lens"], -(-CONTEXT // size)
    counts = -(-lengths // size)
    free = iter(rng.permutation(int(counts.sum()) + 3))
    table = np.full((len(lengths), max_pages), 1 << 30, np.int32)  # entries that nobody may read
    for row, count in enumerate(counts):
        table[row, :count] = [next(free) for _ in range(count)]
    made = dict(static) | {"block_table": table}
    for name in (v.name for v in graph.inputs if v.name.startswith("kv.")):
        dense, pages = static[name], np.full((int(counts.sum()) + 3, 2, KV_HEADS, size, D), np.nan, np.float32)
        for row, slot in enumerate(static["kv_index"]):
            for p in range(lengths[row]):
                pages[table[row, p // size], :, :, p % size] = dense[slot, :, :, p]
        made[name] = pages
    return made


@settings(max_examples=25)
@given(batches(), st.sampled_from([16, 32, 64, 128]), st.sampled_from([None, 5, 33]), st.integers(0, 2**32))
def test_paged_answers_are_the_static_ones(batch, size, window, seed):
    rng = np.random.default_rng(seed)
    static = decoder_graph(window=window)
    paged = run_passes(static, [lambda g: layout_kv(g, KVLayout("paged", size))], "test")
    inputs = inputs_of(static, *batch, rng)
    pages = paged_inputs(inputs, static, size, rng)
    expected, got = interpret(static, inputs), interpret(paged, pages)
    np.testing.assert_array_equal(got["out"], expected["out"])
    for row, slot in enumerate(inputs["kv_index"]):
        for p in range(inputs["seq_lens"][row]):
            page = pages["block_table"][row, p // size]
            np.testing.assert_array_equal(got["kv.1"][page, :, :, p % size], expected["kv.1"][slot, :, :, p])


def test_the_static_layout_is_the_graph_itself_and_a_paged_graph_prints_and_parses():
    graph = decoder_graph()
    assert layout_kv(graph, KVLayout()) is graph
    paged = layout_kv(graph, KVLayout("paged", 16))
    verify(paged)
    names = [v.name for v in paged.inputs]
    assert names[names.index("kv_index") + 1] == "block_table"
    assert next(v for v in paged.inputs if v.name == "block_table").type.shape == (symbol("rows"), 5)
    assert {n.attrs.layout for n in paged.nodes} == {"paged"}
    assert str(parse_graph(str(paged))) == str(paged)


@pytest.mark.parametrize(("layout", "index"), [("static", "block_table"), ("paged", "kv_index")])
def test_an_index_of_the_other_layout_is_refused(layout, index):
    b = Builder("wrong", (Dim("rows", 1, 4),))
    rows = symbol("rows")
    types = {"kv_index": (rows,), "block_table": (rows, 5)}
    x = b.input("x", TensorType(f32, (rows, KV_HEADS, D)))
    kv = b.input("kv", TensorType(f32, (7, 2, KV_HEADS, 16, D)))
    ids = b.input("ids", TensorType(i32, (rows,)))
    with pytest.raises(TypeError, match=f"no index of a {layout} cache"):
        b.emit("kv_append", kv, x, x, ids, ids, b.input(index, TensorType(i32, types[index])), attrs=KVAttrs(layout))
