"""Turns weights over: kernels of linear layers read rows of a weight, and ONNX's MatMul has it the other way round.

x @ w, over the first axis of w [K, N]  ->  x @ wt, over the second axis of wt = transpose(w) [N, K]
"""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.builder import Builder
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.ops.shape import PermutationAttrs
from aotc.passes.merge_dots import weight_values

_DTYPES = ("f32", "f16", "bf16")  # of which there are such kernels


def turn_weights(graph: Graph) -> Graph:
    """Transposes each weight that a product contracts over the first axis of, once. The compiler computes it."""
    weights = weight_values(graph)
    found = [n for n in graph.nodes if _is_turned(n, weights)]
    if not found:
        return graph
    builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    turned: dict[Value, Value] = {}
    for node in graph.nodes:
        if node in found:
            x, w = node.inputs
            if w not in turned:
                turned[w] = builder.emit("transpose", w, attrs=PermutationAttrs((1, 0)), sources=node.sources)
            node = replace(node, inputs=(x, turned[w]), attrs=replace(node.attrs, rhs_contracting=(1,)))
        builder.nodes.append(node)
    return replace(graph, nodes=tuple(builder.nodes))


def _is_turned(node: Node, weights: set[Value]) -> bool:
    if node.op != "dot_general" or node.inputs[1] not in weights:
        return False
    x, w = (v.type for v in node.inputs)
    over = node.attrs == DotAttrs((x.rank - 1,), (0,))
    return over and x.rank > 1 and w.rank == 2 and w.packing is None and {x.dtype.name, w.dtype.name} <= set(_DTYPES)
