"""Spells composites out as primitives where a target has no template for them."""

from __future__ import annotations

from aotc.ir.builder import Builder
from aotc.ir.graph import Graph, Value, dead_code_free, substitute
from aotc.ir.ops import OPS
from aotc.ir.ops.composite import OPS as IN_LOOPS


def spell_out(graph: Graph, whole: frozenset[str]) -> Graph:
    """The graph without composites that neither a loop nest computes as they are nor a template, one of `whole`."""
    kept = whole | {op.name for op in IN_LOOPS}
    if all(OPS[n.op].decompose is None or n.op in kept for n in graph.nodes):
        return graph
    builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    mapping: dict[Value, Value] = {}
    for node in graph.nodes:
        decompose = OPS[node.op].decompose
        if decompose is None or node.op in kept:
            builder.nodes.append(node)
        else:
            builder.source = node.sources
            mapping[node.out] = decompose(builder, node.inputs, node.attrs)
    return dead_code_free(substitute(graph, mapping, builder.nodes))
