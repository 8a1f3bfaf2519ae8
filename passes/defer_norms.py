"""Moves a norm between two linear layers behind the product of the second: it needs no kernel of its own then.

y = rms_norm(x, g) @ w  ->  y = (x * g @ w) * rms_scale(sums_of_squares(x)), row by row

Whoever makes x has the tile at hand: it writes x * g and sums of neighbouring squares too. Not for f16, where x * g
may overflow. Rounding to 16 bits is relative, so that the order of scaling and rounding does not matter.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from aotc.ir.builder import Builder
from aotc.ir.dtypes import DType, bf16, f32
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops import OPS
from aotc.ir.ops.composite import ScaleAttrs, SquaresAttrs, along
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.shape import BroadcastAttrs
from aotc.ir.sizes import product, upper_bound
from aotc.ir.templates import Templates
from aotc.passes.fuse import is_layer

TYPES = (bf16, f32)
SUMS = 128  # of a row, about: few to add up again, and of few enough columns for narrow tiles


def defer_norms(graph: Graph, templates: Templates) -> Graph:
    """The graph with the norms of more rows than `matmul` normalises itself moved behind its product."""
    users, computed = graph.users(), graph.producers()

    made = {_made(n, users) for n in graph.nodes if is_layer(n, templates, computed)}
    deferred: dict[Node, Node] = {}  # norm -> the product of what it makes
    for node in graph.nodes:
        if node.op == "rms_norm" and node.inputs[0] in made and _can_wait(node, graph, templates):
            readers = users.get(node.out, [])
            if len(readers) == 1 and is_layer(readers[0], templates, computed) and readers[0].inputs[0] is node.out:
                deferred[node] = readers[0]
    if not deferred:
        return graph
    b = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
    env: dict[Value, Value] = {}
    sums: dict[Node, tuple[Value, Node]] = {}  # product -> sums of the squares of its row of x, the norm
    for node in graph.nodes:
        node_here = replace(node, inputs=tuple(env.get(v, v) for v in node.inputs))
        if node in deferred:
            x, weight = node_here.inputs
            squares = b.emit("sums_of_squares", x, attrs=SquaresAttrs(_width(node)), sources=node.sources)
            sums[deferred[node]] = squares, node
            wide = b.emit("broadcast_in_dim", weight, attrs=BroadcastAttrs(x.type.shape, (x.type.rank - 1,)))
            wide = _as(b, wide, x.type.dtype)
            env[node.out] = _as(b, b.emit("multiply", x, wide, sources=node.sources), node.out.type.dtype)
            continue
        b.nodes.append(node_here)
        if node in sums:
            env[node.out] = _scaled(b, node.out, *sums[node])
    return replace(graph, nodes=tuple(b.nodes), outputs=tuple(env.get(v, v) for v in graph.outputs))


def _scaled(b: Builder, y: Value, sums: Value, norm: Node) -> Value:
    """A product, each row times what the norm before it would have scaled x by."""
    attrs = ScaleAttrs(norm.attrs.eps, int(norm.out.type.shape[-1]))  # type: ignore[arg-type]
    scale, wide = b.emit("rms_scale", sums, attrs=attrs, sources=norm.sources), _as(b, y, f32)
    rows = along(b, scale, wide, tuple(range(y.type.rank - 1)))
    return _as(b, b.emit("multiply", wide, rows, sources=norm.sources), y.type.dtype)


def _made(dot: Node, users: dict[Value, list[Node]]) -> Value:
    """What a linear layer and the elementwise work behind it make, up to where several nodes read it."""
    value = dot.out
    while True:
        readers = users.get(value, [])
        if len(readers) != 1 or not OPS[readers[0].op].elementwise or readers[0].out.type.shape != value.type.shape:
            return value
        value = readers[0].out


def _can_wait(norm: Node, graph: Graph, templates: Templates) -> bool:
    """Whether a norm can wait: rows as the templates take them, a width in whole sums, a type with f32's range."""
    shape = norm.out.type.shape
    fit = templates.norm_rows < upper_bound(product(shape[:-1]), graph.dims) <= templates.scaled_rows
    return norm.out.type.dtype in TYPES and fit and _width(norm) >= 16


def _width(norm: Node) -> int:
    """Squares that are added up together: 16 to 64, a power of two."""
    last = norm.out.type.shape[-1]
    if not isinstance(last, int):
        return 0
    return next((w for w in (16, 32, 64) if last // w <= SUMS and last % w == 0), gcd(last, 64))


def _as(b: Builder, x: Value, dtype: DType) -> Value:
    return x if x.type.dtype == dtype else b.emit("convert", x, attrs=ConvertAttrs(dtype))
