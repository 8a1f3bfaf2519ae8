"""Merges linear layers that read the same value: q, k and v become one matmul, gate and up another.

a = x @ wa; b = x @ wb  ->  y = x @ concat(wa, wb); a = y[:, :na]; b = y[:, na:]
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.builder import Builder
from aotc.ir.graph import Graph, Node, Value, dead_code_free, substitute
from aotc.ir.ops.shape import AxisAttrs, BroadcastAttrs, SliceAttrs


@dataclass(frozen=True)
class Linear:
    """A matmul with a weight, and the bias added to it where there is one. `out` is what others read."""

    dot: Node
    bias: Value | None
    out: Value


def merge_dots(graph: Graph) -> Graph:
    """Merges every group of two or more linear layers with the same input and attributes."""
    groups: dict[tuple[Value, object], list[Linear]] = {}
    weights = weight_values(graph)
    users, producers = graph.users(), graph.producers()
    for node in graph.nodes:
        if node.op == "dot_general" and node.inputs[1] in weights and node.inputs[1].type.rank == 2:
            key = (node.inputs[0], node.attrs)
            groups.setdefault(key, []).append(
                _linear(node, users if node.out not in graph.outputs else {}, producers, weights)
            )
    groups = {key: group for key, group in groups.items() if len(group) > 1 and _alike(group)}
    if not groups:
        return graph
    # The merged matmul stands where the first one stood: its biases are weights, so they are there already.
    at = {group[0].dot: group for group in groups.values()}
    builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    mapping: dict[Value, Value] = {}
    weight_nodes = {n for n in graph.nodes if all(v in weights for v in n.outputs)}
    builder.nodes.extend(n for n in graph.nodes if n in weight_nodes)
    for node in graph.nodes:
        if node in at:
            mapping.update(_merge(builder, at[node]))
        if node not in weight_nodes:
            builder.nodes.append(node)
    return dead_code_free(substitute(graph, mapping, builder.nodes))


def weight_values(graph: Graph) -> set[Value]:
    """Values computed from weights, with constants, alone, whatever the dims are. Broadcasts are left to the kernels:
    they cost memory."""
    known = {w.value for w in graph.weights}
    constants: set[Value] = set()
    for node in graph.nodes:
        if node.op == "constant":
            constants.update(node.outputs)
        elif (
            node.op != "broadcast_in_dim"
            and known.intersection(node.inputs)
            and all(v in known or v in constants for v in node.inputs)
            and all(isinstance(s, int) for v in node.outputs for s in v.type.shape)
        ):
            known.update(node.outputs)
    return known


def _linear(dot: Node, users: dict[Value, list[Node]], producers: dict[Value, Node], weights: set[Value]) -> Linear:
    readers = users.get(dot.out, [])
    if len(readers) == 1 and readers[0].op == "add":
        other = next((v for v in readers[0].inputs if v is not dot.out), None)
        producer = producers.get(other) if other is not None else None
        along = BroadcastAttrs(dot.out.type.shape, (dot.out.type.rank - 1,))
        if producer is not None and producer.attrs == along and producer.inputs[0] in weights:
            return Linear(dot, producer.inputs[0], readers[0].out)
    return Linear(dot, None, dot.out)


def _alike(group: list[Linear]) -> bool:
    return len({unit.bias is None for unit in group}) == 1 and len({unit.dot.inputs[1] for unit in group}) == len(group)


def _merge(b: Builder, group: list[Linear]) -> dict[Value, Value]:
    sources = tuple(s for unit in group for s in unit.dot.sources)
    first = group[0].dot
    out_axis = 1 - first.attrs.rhs_contracting[0]
    weight = b.emit("concatenate", *(u.dot.inputs[1] for u in group), attrs=AxisAttrs(out_axis), sources=sources)
    out = b.emit("dot_general", first.inputs[0], weight, attrs=first.attrs, sources=sources)
    if group[0].bias is not None:
        bias = b.emit("concatenate", *(u.bias for u in group if u.bias), attrs=AxisAttrs(0), sources=sources)
        along = BroadcastAttrs(out.type.shape, (out.type.rank - 1,))
        out = b.emit("add", out, b.emit("broadcast_in_dim", bias, attrs=along, sources=sources), sources=sources)
    mapping, start = {}, 0
    for unit in group:
        size = unit.dot.out.type.shape[-1]
        zeros = (0,) * (out.type.rank - 1)
        attrs = SliceAttrs(
            (*zeros, start), (*out.type.shape[:-1], start + size), (1,) * out.type.rank
        )  # fmt: skip
        mapping[unit.out] = b.emit("slice", out, attrs=attrs, sources=unit.dot.sources)
        start = start + size  # type: ignore[assignment]
    return mapping
