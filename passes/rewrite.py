"""Rewrite rules as data: a pattern, a check that answers with a reason, and a rewrite.

Patterns are nested: `Op("add", Var("x"), Splat("eps"))`. `Maybe("convert", p)` also matches p itself. Arguments of
commutative ops match in both orders. Rules stand in explicit tuples, and `apply` runs them until none fires.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from aotc.ir.builder import Builder
from aotc.ir.graph import Graph, Node, Value, dead_code_free, substitute

log = logging.getLogger("aotc.passes")

COMMUTATIVE = {"add", "multiply", "maximum", "minimum", "and", "or", "xor"}


@dataclass(frozen=True)
class Var:
    """Any value; the same name must match the same value."""

    name: str


@dataclass(frozen=True)
class Splat:
    """A constant, seen through broadcasts; binds its number."""

    name: str


@dataclass(frozen=True)
class Maybe:
    """`op(pattern)`, or `pattern` itself."""

    op: str
    pattern: Pattern


class Op:
    """A node of one op. `bind` also binds its output value; `bind.attrs` is read through the match's `node`."""

    def __init__(self, op: str, *args: Pattern, bind: str | None = None) -> None:
        self.op, self.args, self.bind = op, args, bind


Pattern = Var | Splat | Maybe | Op
Match = dict[str, Any]


class Context:
    """What a rule sees of the graph being rewritten: producers, and a builder that adds nodes."""

    def __init__(self, graph: Graph) -> None:
        self.builder = Builder(graph.name, graph.dims, (v.name for v in graph.values()))
        self.producer: dict[Value, Node] = {}
        self.uses: dict[Value, int] = {v: len(u) for v, u in graph.users().items()}
        for v in graph.outputs:
            self.uses[v] = self.uses.get(v, 0) + 1

    def node(self, value: Value) -> Node | None:
        """The node that makes `value`, or None for inputs and weights."""
        return self.producer.get(value)

    def is_op(self, value: Value, op: str) -> bool:
        node = self.producer.get(value)
        return node is not None and node.op == op


@dataclass(frozen=True)
class Rule:
    """`check` returns the reason for not rewriting, or None; `rewrite` emits and returns the new value."""

    name: str
    pattern: Op
    rewrite: Callable[[Context, Match], Value]
    check: Callable[[Context, Match], str | None] = lambda ctx, m: None


def match(pattern: Pattern, value: Value, ctx: Context, bound: Match) -> Iterator[Match]:
    """Every way in which `pattern` matches the computation of `value`."""
    if isinstance(pattern, Var):
        if bound.get(pattern.name, value) is value:
            yield {**bound, pattern.name: value}
    elif isinstance(pattern, Splat):
        number = splat_of(value, ctx)
        if number is not None:
            yield {**bound, pattern.name: number}
    elif isinstance(pattern, Maybe):
        node = ctx.node(value)
        if node is not None and node.op == pattern.op:
            yield from match(pattern.pattern, node.inputs[0], ctx, bound)
        yield from match(pattern.pattern, value, ctx, bound)
    else:
        yield from _match_op(pattern, value, ctx, bound)


def _match_op(pattern: Op, value: Value, ctx: Context, bound: Match) -> Iterator[Match]:
    node = ctx.node(value)
    if node is None or node.op != pattern.op or len(node.inputs) != len(pattern.args):
        return
    if pattern.bind is not None:
        bound = {**bound, pattern.bind: node}
    orders = [node.inputs]
    if node.op in COMMUTATIVE:
        orders.append(node.inputs[::-1])
    for inputs in orders:
        yield from _match_all(pattern.args, inputs, ctx, bound)


def _match_all(patterns: tuple[Pattern, ...], values: tuple[Value, ...], ctx: Context, bound: Match) -> Iterator[Match]:
    if not patterns:
        yield bound
        return
    for found in match(patterns[0], values[0], ctx, bound):
        yield from _match_all(patterns[1:], values[1:], ctx, found)


def splat_of(value: Value, ctx: Context) -> float | int | bool | None:
    """The number that every element of `value` is, or None."""
    node = ctx.node(value)
    while node is not None and node.op in ("broadcast_in_dim", "reshape", "convert"):
        node = ctx.node(node.inputs[0])
    return node.attrs.value if node is not None and node.op == "constant" else None


def apply(graph: Graph, rules: Iterable[Rule]) -> Graph:
    """The graph after the rules, applied in program order until none fires."""
    by_op: dict[str, list[Rule]] = {}
    for rule in rules:
        by_op.setdefault(rule.pattern.op, []).append(rule)
    for _ in range(100):
        graph, fired = _sweep(graph, by_op)
        if not fired:
            return graph
    raise AssertionError(f"rules never end on graph {graph.name}: {fired}")


def _sweep(graph: Graph, by_op: dict[str, list[Rule]]) -> tuple[Graph, list[str]]:
    ctx = Context(graph)
    mapping: dict[Value, Value] = {}
    fired: list[str] = []
    nodes = ctx.builder.nodes
    for node in graph.nodes:
        if any(v in mapping for v in node.inputs):
            node = replace(node, inputs=tuple(_final(mapping, v) for v in node.inputs))
        nodes.append(node)
        ctx.producer.update((v, node) for v in node.outputs)
        for rule in by_op.get(node.op, ()):
            new = _try(rule, node, ctx)
            if new is not None:
                mapping[node.outputs[0]] = new
                fired.append(rule.name)
                break
    if not fired:
        return graph, fired
    return dead_code_free(substitute(graph, mapping, nodes)), fired


def _try(rule: Rule, node: Node, ctx: Context) -> Value | None:
    for found in match(rule.pattern, node.outputs[0], ctx, {"out": node.outputs[0], "node": node}):
        reason = rule.check(ctx, found)
        if reason is not None:
            log.debug("%s: not at %%%s: %s", rule.name, node.outputs[0].name, reason)
            continue
        before = len(ctx.builder.nodes)
        ctx.builder.source = _sources(node, ctx, found)
        new = rule.rewrite(ctx, found)
        if new is node.outputs[0]:
            continue
        for made in ctx.builder.nodes[before:]:
            ctx.producer.update((v, made) for v in made.outputs)
        return new
    return None


def _sources(node: Node, ctx: Context, found: Match) -> tuple[str, ...]:
    """Source names of everything the match covers, in order, each once."""
    leaves = {v for v in found.values() if isinstance(v, Value) and v is not node.outputs[0]}
    names: dict[str, None] = {}

    def visit(n: Node) -> None:
        for v in n.inputs:
            inner = ctx.node(v)
            if v not in leaves and inner is not None:
                visit(inner)
        names.update(dict.fromkeys(n.sources))

    visit(node)
    return tuple(names)[-4:]


def _final(mapping: dict[Value, Value], value: Value) -> Value:
    while value in mapping:
        value = mapping[value]
    return value
