"""Chooses how a decoder's KV caches lie: a slot for the longest sequence, or pages that a sequence takes as it grows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aotc.ir.dtypes import i32
from aotc.ir.graph import Graph, Node, TensorType, Value
from aotc.ir.sizes import Dim, symbol

MAX_PAGES = (1 << 31) - 1
MIN_PAGE_SIZE = 16


@dataclass(frozen=True)
class KVLayout:
    """`layout` is static or paged; a page holds `page_size` tokens, a power of two of at least MIN_PAGE_SIZE."""

    layout: str = "static"
    page_size: int = 64


def layout_kv(graph: Graph, options: KVLayout) -> Graph:
    """The graph with its caches in a layout; it comes with static ones.

    Paged: kv.N [slots, 2, h, context, d] -> [pages, 2, h, page_size, d], and kv_append and attention take the new
    input block_table i32 [rows, max_pages] where they took kv_index. The history stays in slots.
    """
    if options.layout == "static":
        return graph
    size = options.page_size
    assert size >= MIN_PAGE_SIZE and not size & (size - 1), f"page size {size}"
    uses = [n for n in graph.nodes if n.op in ("kv_append", "attention")]
    rows, context = uses[0].inputs[-1].type.shape[0], uses[0].inputs[0].type.shape[3]
    assert isinstance(context, int)
    table = Value("block_table", TensorType(i32, (rows, -(-context // size))))
    paged: dict[Value, Value] = {}
    for node in uses:
        if node.op == "kv_append":
            for cache in (node.inputs[0], node.out):
                _, two, heads, _, d = cache.type.shape
                type_ = TensorType(cache.type.dtype, (symbol("pages"), two, heads, size, d))
                paged[cache] = Value(cache.name, type_)

    def rewired(node: Node) -> Node:
        inputs = tuple(paged.get(v, v) for v in node.inputs)
        if node not in uses:
            return replace(node, inputs=inputs)
        attrs = replace(node.attrs, layout="paged")
        outputs = tuple(paged.get(v, v) for v in node.outputs)
        return replace(node, inputs=(*inputs[:-1], table), outputs=outputs, attrs=attrs)

    inputs = [paged.get(v, v) for v in graph.inputs]
    inputs.insert(1 + [v.name for v in inputs].index("kv_index"), table)
    return replace(
        graph, inputs=tuple(inputs), outputs=tuple(paged.get(v, v) for v in graph.outputs),
        nodes=tuple(map(rewired, graph.nodes)), dims=(*graph.dims, Dim("pages", 1, MAX_PAGES)),
    )  # fmt: skip
