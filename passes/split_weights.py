"""Separates what depends on weights alone: a prologue that the compiler evaluates once, and the graph that runs."""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.graph import Graph, Value, Weight, dead_code_free
from aotc.passes.merge_dots import weight_values


def split_weights(graph: Graph) -> tuple[Graph, Graph]:
    """(prologue, main). Each output of the prologue is a weight of main, under the same key.

    A key lists the source tensors that the value is made of, and its packing.
    """
    computed = weight_values(graph)
    producers = graph.producers()
    leaf = {w.value: w.key for w in graph.weights}
    needed = {v for n in graph.nodes for v in n.inputs if v in computed and not set(n.outputs) <= computed}
    needed |= {v for v in graph.outputs if v in computed}
    keys: dict[str, Value] = {}
    for value in (v for v in graph.values() if v in needed):
        keys[_unique(_key(value, leaf, producers), keys)] = value
    prologue = dead_code_free(
        replace(
            graph,
            name="weights",
            dims=(),
            inputs=(),
            outputs=tuple(keys.values()),
            output_names=tuple(keys),
            aliases=(),
        )
    )
    main = replace(
        graph,
        weights=tuple(Weight(v, k) for k, v in keys.items()),
        nodes=tuple(n for n in graph.nodes if not n.outputs or not set(n.outputs) <= computed),
    )
    return prologue, dead_code_free(main)


def cone(graph: Graph, key: str) -> Graph:
    """The part of the prologue that computes one weight."""
    return dead_code_free(replace(graph, outputs=(graph.output(key),), output_names=(key,)))


def _key(value: Value, leaf: dict[Value, str], producers: dict) -> str:
    names: dict[str, None] = {}

    def visit(v: Value) -> None:
        if v in leaf:
            names[leaf[v]] = None
        for inner in producers[v].inputs if v in producers else ():
            visit(inner)

    visit(value)
    packing = f"{{{value.type.packing}}}" if value.type.packing else ""
    return "+".join(names) + packing


def _unique(key: str, taken: dict[str, Value]) -> str:
    candidate, n = key, 1
    while candidate in taken:
        n += 1
        candidate = f"{key}#{n}"
    return candidate
