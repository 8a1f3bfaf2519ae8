"""Makes the programs of a decoder from its one graph: `decode[b]`, one token a row, and `extend[t]`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from aotc.ir.graph import Graph, Node, TensorType, Value, dead_code_free
from aotc.ir.sizes import Dim, Expr, Size, evaluate, symbol


def decode(graph: Graph, rows: int) -> Graph:
    """Up to `rows` sequences, each with one new token: flat tokens are rows, and each is its row's last one."""
    bounds = tuple(Dim("rows", 1, rows) if d.name == "rows" else d for d in graph.dims if d.name != "tokens")
    graph = substitute_dims(replace(graph, name=f"decode_{rows}", dims=bounds), {"tokens": symbol("rows")})
    mapping = {n.out: n.inputs[0] for n in graph.nodes if n.op == "last_rows"}
    nodes = tuple(replace(n, inputs=tuple(mapping.get(v, v) for v in n.inputs)) for n in graph.nodes)
    return dead_code_free(replace(graph, nodes=nodes))


def extend(graph: Graph, tokens: int, rows: int) -> Graph:
    """Up to `tokens` flat tokens in at most `rows` rows of any length."""
    bounds = tuple(
        Dim(d.name, d.lo, tokens if d.name == "tokens" else min(d.hi, tokens, rows) if d.name == "rows" else d.hi)
        for d in graph.dims
    )
    return replace(graph, name=f"extend_{tokens}", dims=bounds)


def substitute_dims(graph: Graph, dims: dict[str, Size]) -> Graph:
    """The graph with dims replaced in every type and attribute; its dim list must already fit."""
    values: dict[Value, Value] = {}
    everything = {d.name: symbol(d.name) for d in graph.dims} | dims

    def new(v: Value) -> Value:
        if v not in values:
            values[v] = Value(v.name, _at(v.type, everything))
        return values[v]

    def node(n: Node) -> Node:
        changed = {f.name: _attr_at(getattr(n.attrs, f.name), everything) for f in fields(n.attrs)}
        return replace(
            n, inputs=tuple(map(new, n.inputs)), outputs=tuple(map(new, n.outputs)), attrs=replace(n.attrs, **changed)
        )

    return replace(
        graph, inputs=tuple(map(new, graph.inputs)), outputs=tuple(map(new, graph.outputs)),
        nodes=tuple(map(node, graph.nodes)), weights=tuple(replace(w, value=new(w.value)) for w in graph.weights),
    )  # fmt: skip


def _at(type_: TensorType, dims: dict[str, Any]) -> TensorType:
    return type_.at(dims)


def _attr_at(value: Any, dims: dict[str, Any]) -> Any:
    if isinstance(value, Expr):
        return evaluate(value, dims)
    if isinstance(value, tuple):
        return tuple(_attr_at(v, dims) for v in value)
    return substitute_dims(value, dims) if isinstance(value, Graph) else value
