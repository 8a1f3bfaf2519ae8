"""The node tests of onnx's own backend suite, run through the importer and the interpreter.

Cases give every parameter as an input of the graph. Where an operator's row asks for one at compile time (axes, shapes,
counts), the case's array is made an initialiser, as exporters write them.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase

from aotc.frontend.model import Model, read_logical
from aotc.frontend.onnx import open_onnx
from aotc.frontend.onnx.call import UnknownParameterError
from aotc.ir.interpret import interpret
from aotc.ir.verify import verify

TOLERANCES = {"float32": (1e-3, 1e-5), "float64": (1e-3, 1e-7), "float16": (5e-3, 1e-3), "bfloat16": (2e-2, 4e-3)}
"""Relative and absolute, by element type. The suite's own are 1e-3 and 1e-7 for all, which no rounding of a 16-bit
intermediate meets: references round after every op there, and the interpreter once."""


@cache
def cases() -> Mapping[str, list[TestCase]]:
    """The suite's cases by operator; those of an operator's expansion into others are among its own."""
    with warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases()
    operators: dict[str, str] = {}
    by_operator = defaultdict(list)
    for case in found:
        base = case.name.split("_expanded")[0]
        if base == case.name:
            operators[base] = case.model.graph.node[0].op_type
        by_operator[operators[base]].append(case)
    return by_operator


def array(value: np.ndarray | TensorProto) -> np.ndarray:
    """A case's input or output, some of which are messages."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def run(case: TestCase, path: Path, dynamic: bool = False) -> str:
    """Runs a case: "" where all outputs agree, else what is different. Raises UnsupportedError for a refusal.

    With `dynamic`, each size above 1 in an input is a dim, the same one for equal sizes.
    """
    ((inputs, outputs),) = case.data_sets
    names = [v.name for v in case.model.graph.input]
    feed = dict(zip(names, inputs, strict=True))
    model = open_with_parameters(case.model, feed, path, dynamic)
    verify(model.graph)
    arrays = {v.name: array(feed[v.name]) for v in model.graph.inputs}
    got = interpret(model.graph, arrays, lambda key: read_logical(model.weights, key))
    named = zip((v.name for v in case.model.graph.output), outputs, strict=True)
    return "; ".join(d for d in (difference(name, got[name], array(want)) for name, want in named) if d)


def open_with_parameters(
    proto: ModelProto, feed: Mapping[str, np.ndarray], path: Path, dynamic: bool = False
) -> Model:
    """Imports a model; inputs that must be known become initialisers, one after the other."""
    proto = onnx.load_model_from_string(proto.SerializeToString())
    for dim in (d for v in proto.graph.input for d in v.type.tensor_type.shape.dim if dynamic and d.dim_value > 1):
        dim.dim_param = f"d{dim.dim_value}"
    while True:
        path.write_bytes(proto.SerializeToString())
        free = {v.name for v in proto.graph.input} - {t.name for t in proto.graph.initializer}
        named = {d.dim_param for v in proto.graph.input if v.name in free for d in v.type.tensor_type.shape.dim}
        try:
            return open_onnx(path, {name: (1, 2 * int(name[1:]) if name[1:] else 64) for name in named if name})
        except UnknownParameterError as error:
            needed = sorted(free & set(_ancestors(proto.graph.node, error.tensor)))
            if not needed:
                raise
            for name in needed:
                tensor = feed[name]
                made = tensor if isinstance(tensor, TensorProto) else numpy_helper.from_array(np.asarray(tensor))
                proto.graph.initializer.append(made)
                proto.graph.initializer[-1].name = name


def _ancestors(nodes: list[NodeProto], name: str) -> Iterator[str]:
    """The tensor and all whose elements it is computed from; shapes are not elements."""
    makers = {output: node for node in nodes for output in node.output}
    seen, waiting = set(), [name]
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        yield tensor
        node = makers.get(tensor)
        if node is not None and node.op_type not in ("Shape", "Size"):
            waiting += [*node.input, *(i for a in node.attribute for i in _inner(a))]


def _inner(attribute: AttributeProto) -> Iterator[str]:
    if attribute.type == AttributeProto.GRAPH:
        for node in attribute.g.node:
            yield from node.input


def difference(name: str, got: np.ndarray, want: np.ndarray) -> str:
    """What is different in an output: "" for nothing."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{name} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if str(want.dtype) not in TOLERANCES:
        return "" if np.array_equal(got, want) else f"{name} differs in {np.sum(got != want)} of {want.size} elements"
    rtol, atol = TOLERANCES[str(want.dtype)]
    close = np.isclose(got.astype(np.float64), want.astype(np.float64), rtol, atol, equal_nan=True)
    return "" if close.all() else f"{name} differs in {np.sum(~close)} of {want.size} elements, first {got[~close][0]}"
