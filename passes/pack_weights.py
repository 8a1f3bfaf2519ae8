"""Chooses the physical layout of weights that matmuls read, and keeps one copy where a gather reads the same one."""

from __future__ import annotations

from aotc.ir.builder import Builder
from aotc.ir.graph import Graph, Node, Value, dead_code_free, substitute
from aotc.ir.ops.shape import PackingAttrs
from aotc.passes.merge_dots import weight_values


def pack_weights(graph: Graph, packings: dict[str, str]) -> Graph:
    """Repacks each weight [N, K] of a matmul over K; `packings` names the layout for each element type."""
    weights = weight_values(graph)
    wanted = {v for n in graph.nodes if is_linear(n) for v in [n.inputs[1]] if v in weights}
    wanted = {v for v in wanted if v.type.dtype.name in packings and v.type.packing is None}
    if not wanted:
        return graph
    builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    mapping: dict[Value, Value] = {}
    packed: set[Value] = set()

    def pack(v: Value, node: Node | None) -> None:
        attrs = PackingAttrs(packings[v.type.dtype.name])
        mapping[v] = builder.emit("repack", v, attrs=attrs, sources=node.sources if node else ())
        packed.add(mapping[v])

    for w in graph.weights:
        if w.value in wanted:
            pack(w.value, None)
    for node in graph.nodes:
        builder.nodes.append(node)
        for v in node.outputs:
            if v in wanted:
                pack(v, node)
    # Only matmuls and gathers read packed weights; whatever else computes with the weight keeps the dense one.
    reads_packed = {n for n in graph.nodes if is_linear(n) or (n.op == "gather" and n.attrs.axis == 0)}
    nodes = []
    for node in builder.nodes:
        if node in reads_packed:
            swap = {v: mapping[v] for v in node.inputs if v in mapping and _position_fits(node, v)}
            (node,) = substitute(graph, swap, [node]).nodes
        nodes.append(node)
    return dead_code_free(substitute(graph, {}, nodes))


def is_linear(node: Node) -> bool:
    """x [..., K] times a weight [N, K] over K."""
    if node.op != "dot_general":
        return False
    at, (x, w) = node.attrs, node.inputs
    return (
        at.lhs_contracting == (x.type.rank - 1,)
        and at.rhs_contracting == (1,)
        and not at.lhs_batch
        and w.type.rank == 2
    )


def _position_fits(node: Node, value: Value) -> bool:
    return node.inputs.index(value) == (0 if node.op == "gather" else 1)
