"""Folds what needs no work, merges equal nodes, and gives each computation one form."""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.graph import Graph, Value, dead_code_free, substitute
from aotc.ir.ops.shape import BroadcastAttrs, ConstantAttrs, PermutationAttrs, ShapeAttrs
from aotc.passes.rewrite import Context, Match, Op, Rule, Var, apply


def canonicalize(graph: Graph) -> Graph:
    """Rules until none fires, then common subexpressions, then dead code."""
    return merge_equal(apply(graph, RULES))


def merge_equal(graph: Graph) -> Graph:
    """Nodes with the same op, inputs and attributes become one. States are linear: their updates never merge."""
    seen: dict[object, tuple[Value, ...]] = {}
    mapping: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        node = replace(node, inputs=tuple(mapping.get(v, v) for v in node.inputs))
        key = (node.op, node.inputs, node.attrs)
        if key in seen and node.op not in ("kv_append", "sample", "fusion", "if"):
            mapping.update(zip(node.outputs, seen[key], strict=True))
        else:
            seen[key] = node.outputs
            nodes.append(node)
    return dead_code_free(substitute(graph, mapping, nodes))


def _same_type(_: Context, m: Match) -> str | None:
    return None if m["x"].type == m["out"].type else "it changes the type"


def _identity(_: Context, m: Match) -> Value:
    return m["x"]


def _broadcast_constant(ctx: Context, m: Match) -> Value:
    constant = m["c"].attrs
    return ctx.builder.emit("constant", attrs=ConstantAttrs(constant.value, constant.dtype, m["out"].type.shape))


def _no_permutation(_: Context, m: Match) -> str | None:
    order = m["node"].attrs.permutation
    return None if list(order) == list(range(len(order))) else "it moves axes"


def _merge_reshapes(ctx: Context, m: Match) -> Value:
    return ctx.builder.emit("reshape", m["x"], attrs=ShapeAttrs(m["out"].type.shape))


def _merge_transposes(ctx: Context, m: Match) -> Value:
    inner, outer = m["inner"].attrs.permutation, m["node"].attrs.permutation
    return ctx.builder.emit("transpose", m["x"], attrs=PermutationAttrs(tuple(inner[p] for p in outer)))


def _merge_broadcasts(ctx: Context, m: Match) -> Value:
    inner, outer = m["inner"].attrs.axes, m["node"].attrs.axes
    axes = tuple(outer[a] for a in inner)
    return ctx.builder.emit("broadcast_in_dim", m["x"], attrs=BroadcastAttrs(m["out"].type.shape, axes))


def _wider_and_back(_: Context, m: Match) -> str | None:
    inner, x = m["inner"].attrs.dtype, m["x"].type.dtype
    if m["out"].type.dtype != x:
        return "it ends in another type"
    exact = inner.kind == x.kind and inner.itemsize > x.itemsize
    return None if exact else "the type between does not hold every value"


def _whole_slice(_: Context, m: Match) -> str | None:
    return None if m["out"].type.shape == m["x"].type.shape else "it drops elements"


def _unit_axes(old: tuple, new: tuple) -> tuple[int, ...] | None:
    """Where each old axis went, if `new` is `old` with axes of size 1 inserted."""
    if len(new) <= len(old):
        return None
    axes, place = [], 0
    for size in old:
        while place < len(new) and new[place] != size:
            if new[place] != 1:
                return None
            place += 1
        if place == len(new):
            return None
        axes.append(place)
        place += 1
    return tuple(axes) if all(s == 1 for s in new[place:]) else None


def _broadcast_reshape(ctx: Context, m: Match) -> Value:
    """broadcast(reshape(x)) where the reshape only inserts unit axes: one broadcast."""
    axes = _unit_axes(m["x"].type.shape, m["inner"].out.type.shape)
    assert axes is not None
    outer = m["node"].attrs.axes
    return ctx.builder.emit(
        "broadcast_in_dim", m["x"], attrs=BroadcastAttrs(m["out"].type.shape, tuple(outer[a] for a in axes))
    )


def _inserts_unit_axes(_: Context, m: Match) -> str | None:
    fits = _unit_axes(m["x"].type.shape, m["inner"].out.type.shape) is not None
    return None if fits else "the reshape moves elements"


X = Var("x")
RULES = (
    # convert(x) to x's own type -> x
    Rule("drop_convert", Op("convert", X), _identity, _same_type),
    # convert(convert(x: bf16, f32), bf16) -> x
    Rule("drop_round_trip", Op("convert", Op("convert", X, bind="inner")), _identity, _wider_and_back),
    # reshape(x) to x's own shape -> x
    Rule("drop_reshape", Op("reshape", X), _identity, _same_type),
    Rule("drop_broadcast", Op("broadcast_in_dim", X), _identity, _same_type),
    Rule("drop_slice", Op("slice", X), _identity, _whole_slice),
    Rule("drop_transpose", Op("transpose", X), _identity, _no_permutation),
    # reshape(reshape(x)) -> reshape(x)
    Rule("merge_reshapes", Op("reshape", Op("reshape", X)), _merge_reshapes),
    Rule("merge_transposes", Op("transpose", Op("transpose", X, bind="inner")), _merge_transposes),
    Rule("merge_broadcasts", Op("broadcast_in_dim", Op("broadcast_in_dim", X, bind="inner")), _merge_broadcasts),
    # broadcast(reshape(x: [t], [t, 1]), [t, n]) -> broadcast(x, [t, n])
    Rule(
        "broadcast_of_unit_axes", Op("broadcast_in_dim", Op("reshape", X, bind="inner")), _broadcast_reshape,
        _inserts_unit_axes,
    ),
    # broadcast(constant) -> constant of that shape; the same for reshape
    Rule("broadcast_constant", Op("broadcast_in_dim", Op("constant", bind="c")), _broadcast_constant),
    Rule("reshape_constant", Op("reshape", Op("constant", bind="c")), _broadcast_constant),
)  # fmt: skip
