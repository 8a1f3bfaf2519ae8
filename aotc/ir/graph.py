"""The Graph IR: typed SSA over pure tensors. Everything is frozen; a rewrite builds a new graph.

A value's identity is the object, its name only makes text readable (and is unique in its graph). Weights are
values bound to a key of the source; a linear state (a KV cache) is an input that an output aliases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aotc.ir.dtypes import DType
from aotc.ir.sizes import Dim, Size, evaluate, product


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type, shape, and the packing that names the physical layout (None: dense, row-major)."""

    dtype: DType
    shape: tuple[Size, ...]
    packing: str | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def ints(self) -> tuple[int, ...]:
        """The shape, where every dim is a number; AssertionError elsewhere."""
        assert all(isinstance(s, int) for s in self.shape), f"{self} has dims"
        return tuple(s for s in self.shape if isinstance(s, int))

    def at(self, dims: Mapping[str, Size]) -> TensorType:
        """The type with dims replaced."""
        return replace(self, shape=tuple(evaluate(s, dims) for s in self.shape))

    def __str__(self) -> str:
        packing = f"{{{self.packing}}}" if self.packing else ""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{packing}"

    __repr__ = __str__


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One SSA value."""

    name: str
    type: TensorType

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True)
class Attrs:
    """Base of the typed attributes of an op; ops without attributes use this one."""


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One operation. `sources` names the nodes of the traced model that it came from."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Any = field(default_factory=Attrs)
    sources: tuple[str, ...] = ()

    @property
    def out(self) -> Value:
        """The only output."""
        (value,) = self.outputs
        return value


@dataclass(frozen=True, slots=True)
class Weight:
    """A value whose content is the tensor `key` of the model source."""

    value: Value
    key: str


@dataclass(frozen=True)
class Graph:
    """A function over tensors. `aliases` maps an output's name to the linear input whose memory it keeps."""

    name: str
    dims: tuple[Dim, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    output_names: tuple[str, ...]
    nodes: tuple[Node, ...]
    weights: tuple[Weight, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def producers(self) -> dict[Value, Node]:
        """The node that makes each value; inputs and weights have none."""
        return {v: n for n in self.nodes for v in n.outputs}

    def users(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, once an occurrence."""
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in node.inputs:
                users.setdefault(v, []).append(node)
        return users

    def values(self) -> Iterator[Value]:
        """Every value in order of definition."""
        yield from self.inputs
        yield from (w.value for w in self.weights)
        for node in self.nodes:
            yield from node.outputs

    def dim_bounds(self) -> dict[str, Dim]:
        return {d.name: d for d in self.dims}

    def output(self, name: str) -> Value:
        """The output named `name`."""
        return self.outputs[self.output_names.index(name)]

    def __str__(self) -> str:
        from aotc.ir.text import print_graph

        return print_graph(self)


def dead_code_free(graph: Graph) -> Graph:
    """The graph without nodes and weights that no output needs."""
    live: set[Value] = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(v in live for v in node.outputs):
            kept.append(node)
            live.update(node.inputs)
    weights = tuple(w for w in graph.weights if w.value in live)
    return replace(graph, nodes=tuple(reversed(kept)), weights=weights)


def substitute(graph: Graph, mapping: Mapping[Value, Value], nodes: Iterable[Node] | None = None) -> Graph:
    """The graph with uses of each key replaced by its value, chains followed; `nodes` replaces the node list."""

    def final(value: Value) -> Value:
        while value in mapping:
            value = mapping[value]
        return value

    def rewired(node: Node) -> Node:
        if not any(v in mapping for v in node.inputs):
            return node
        return replace(node, inputs=tuple(final(v) for v in node.inputs))

    return replace(
        graph,
        nodes=tuple(rewired(n) for n in (graph.nodes if nodes is None else nodes)),
        outputs=tuple(final(v) for v in graph.outputs),
    )
