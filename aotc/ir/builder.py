"""Builds graphs node by node, with types inferred and names made unique."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from aotc.ir.graph import Graph, Node, TensorType, Value, Weight, dead_code_free
from aotc.ir.ops import OPS
from aotc.ir.sizes import Dim


class Builder:
    """Collects inputs, weights and nodes; `finish` makes the graph."""

    def __init__(self, name: str, dims: Iterable[Dim] = (), taken: Iterable[str] = ()) -> None:
        self.name, self.dims = name, tuple(dims)
        self.inputs: list[Value] = []
        self.weights: list[Weight] = []
        self.nodes: list[Node] = []
        self.source: tuple[str, ...] = ()
        self._taken: set[str] = set(taken)

    def value(self, type_: TensorType, hint: str = "") -> Value:
        """A fresh value, named after `hint`, or numbered."""
        name = re.sub(r"[^\w.]+", "_", hint) or str(len(self._taken))
        base, n = name, 0
        while name in self._taken:
            n += 1
            name = f"{base}_{n}"
        self._taken.add(name)
        return Value(name, type_)

    def input(self, name: str, type_: TensorType) -> Value:
        """Declares an input."""
        self.inputs.append(self.value(type_, name))
        return self.inputs[-1]

    def weight(self, key: str, type_: TensorType) -> Value:
        """Declares a weight read from the source under `key`; the same key gives the same value."""
        for w in self.weights:
            if w.key == key:
                return w.value
        self.weights.append(Weight(self.value(type_, key), key))
        return self.weights[-1].value

    def emit(self, op: str, *inputs: Value, attrs: Any = None, sources: tuple[str, ...] | None = None) -> Value:
        """Adds a node with one output and returns that output. Raises TypeError where types do not fit."""
        (out,) = self.emit_many(op, *inputs, attrs=attrs, sources=sources)
        return out

    def emit_many(
        self, op: str, *inputs: Value, attrs: Any = None, sources: tuple[str, ...] | None = None
    ) -> tuple[Value, ...]:
        """Adds a node and returns its outputs."""
        row = OPS[op]
        attrs = row.attrs() if attrs is None else attrs
        types = row.infer(tuple(v.type for v in inputs), attrs)
        outputs = tuple(self.value(t) for t in types)
        self.nodes.append(Node(op, tuple(inputs), outputs, attrs, self.source if sources is None else sources))
        return outputs

    def finish(
        self, outputs: dict[str, Value], aliases: tuple[tuple[str, str], ...] = (), keep_dead: bool = False
    ) -> Graph:
        """The graph of the collected nodes, without dead ones."""
        graph = Graph(
            self.name,
            self.dims,
            tuple(self.inputs),
            tuple(outputs.values()),
            tuple(outputs),
            tuple(self.nodes),
            tuple(self.weights),
            aliases,
        )
        return graph if keep_dead else dead_code_free(graph)
