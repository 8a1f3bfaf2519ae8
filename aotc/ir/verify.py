"""Checks that a graph is well formed. Runs after every pass."""

from __future__ import annotations

from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops import OPS
from aotc.ir.sizes import names_in


class VerifyError(AssertionError):
    """A graph breaks a rule of the IR: a fault of the pass that made it."""


def verify(graph: Graph, outer_dims: frozenset[str] = frozenset()) -> None:
    """Raises VerifyError unless each value is defined once and before its uses, types follow the rules of their
    ops, dims are declared, and linear values are used once."""
    dims = outer_dims | {d.name for d in graph.dims}
    _require(all(d.lo <= d.hi for d in graph.dims), graph, "a dim has lo > hi")
    defined: set[Value] = set()
    names: set[str] = set()

    def define(value: Value) -> None:
        _require(value not in defined and value.name not in names, graph, f"{value} is defined twice")
        used = set().union(*(names_in(s) for s in value.type.shape)) if value.type.shape else set()
        _require(used <= dims, graph, f"{value} uses undeclared dims {sorted(used - dims)}")
        defined.add(value)
        names.add(value.name)

    for value in graph.inputs:
        define(value)
    for weight in graph.weights:
        define(weight.value)
    for node in graph.nodes:
        _require(all(v in defined for v in node.inputs), graph, f"{_show(node)} uses a value before it is defined")
        _check_types(graph, node, dims)
        for value in node.outputs:
            define(value)
    _require(all(v in defined for v in graph.outputs), graph, "an output is not defined")
    _require(len(set(graph.output_names)) == len(graph.outputs), graph, "output names are not unique")
    _check_linear(graph)


def _check_types(graph: Graph, node: Node, dims: set[str] | frozenset[str]) -> None:
    _require(node.op in OPS, graph, f"no op {node.op}")
    row = OPS[node.op]
    _require(isinstance(node.attrs, row.attrs), graph, f"{_show(node)} has attributes {type(node.attrs).__name__}")
    for value in vars(node.attrs).values():
        if isinstance(value, Graph):
            verify(value, frozenset(dims))
    try:
        expected = row.infer(tuple(v.type for v in node.inputs), node.attrs)
    except TypeError as error:
        raise VerifyError(f"graph {graph.name}: {_show(node)}: {error}") from None
    found = tuple(v.type for v in node.outputs)
    _require(found == tuple(expected), graph, f"{_show(node)} has types {found}, the rule says {expected}")


def _check_linear(graph: Graph) -> None:
    """An update consumes its state: nothing may read the old value after it, and nobody else may update it."""
    inputs = {v.name: v for v in graph.inputs}
    for output, source in graph.aliases:
        _require(source in inputs, graph, f"output {output} aliases {source}, which is no input")
        _require(output in graph.output_names, graph, f"alias of {output}, which is no output")
        same = graph.output(output).type == inputs[source].type
        _require(same, graph, f"output {output} and input {source} have different types")
    consumed: dict[Value, Node] = {}
    for node in graph.nodes:
        for value in node.inputs:
            _require(value not in consumed, graph, f"{_show(node)} reads %{value.name} after its update")
        for _, i in linear_pairs(node):
            consumed[node.inputs[i]] = node
    _require(not any(v in consumed for v in graph.outputs), graph, "an output is a state after its update")


def linear_pairs(node: Node) -> tuple[tuple[int, int], ...]:
    """(output, input) pairs of a node that share memory: its own, or those of a fusion's body."""
    if node.op != "fusion":
        return OPS[node.op].linear
    body: Graph = node.attrs.body
    names = [v.name for v in body.inputs]
    return tuple((body.output_names.index(out), names.index(source)) for out, source in body.aliases)


def _show(node: Node) -> str:
    return f"%{node.outputs[0].name} = {node.op}"


def _require(condition: bool, graph: Graph, message: str) -> None:
    if not condition:
        raise VerifyError(f"graph {graph.name}: {message}")
