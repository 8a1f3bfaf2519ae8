"""Makes programs for several sizes from one graph: of a decoder `decode[b]`, one token a row, and `extend[t]`; of a tensor
model one for up to `b` rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from aotc.errors import RequestError
from aotc.ir.graph import Graph, Node, TensorType, Value, dead_code_free
from aotc.ir.sizes import Dim, Expr, Size, evaluate, names_in, symbol


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


def batch(graph: Graph, rows: int) -> Graph:
    """Up to `rows` rows of a tensor model that has a `batch_dim`."""
    (dim,) = graph.dims
    return replace(graph, name=f"{graph.name}_{rows}", dims=(replace(dim, hi=rows),))


def batch_dim(graph: Graph) -> Dim:
    """The dim that counts rows: the only one, and the first axis of each input that has it. Raises RequestError, which
    says why there is none."""
    names = [d.name for d in graph.dims]
    if not names:
        raise RequestError("--batch-sizes is for a model with a dynamic batch, and this one's shapes are fixed: leave it out")
    if len(names) > 1:
        advice = " ".join(f"--dim {name}=N" for name in names[1:])
        raise RequestError(f"--batch-sizes is for a model with one dynamic dim, and this one has {', '.join(names)}: "
                           f"make numbers of the others ({advice}), or leave it out")  # fmt: skip
    dim = graph.dims[0]
    for value in graph.inputs:
        first, *rest = value.type.shape or (1,)
        if any(names_in(s) for s in rest) or (names_in(first) and first != symbol(dim.name)):
            raise RequestError(f"--batch-sizes is for a model whose dynamic dim is the first axis of its inputs, and "
                               f"{value.name} is {value.type}: leave it out")  # fmt: skip
    return dim


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
