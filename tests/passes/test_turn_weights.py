"""Weights that products contract over the first axis of are transposed at compile time, and results stay."""

import numpy as np
import pytest

from aotc.ir.builder import Builder
from aotc.ir.dtypes import f32, i32
from aotc.ir.graph import TensorType
from aotc.ir.interpret import interpret
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.sizes import Dim, symbol
from aotc.passes import split_weights, turn_weights
from aotc.passes.pack_weights import is_linear
from aotc.passes.runner import run_passes

ROWS = symbol("rows")


def product(x, w, attrs, dtype=f32, given=False):
    """y = x times w, and again with x + x; w is a weight, unless it is given."""
    b = Builder("g", (Dim("rows", 1, 8),))
    left = b.input("x", TensorType(dtype, x))
    right = b.input("w", TensorType(dtype, w)) if given else b.weight("w", TensorType(dtype, w))
    outputs = {n: b.emit("dot_general", v, right, attrs=attrs) for n, v in (("y", left), ("z", b.emit("add", left, left)))}
    return b.finish(outputs)


@pytest.mark.parametrize("x", [(ROWS, 4), (ROWS, 3, 4)])
def test_a_weight_is_turned_once_and_computed_at_compile_time(x):
    graph = product(x, (4, 5), DotAttrs((len(x) - 1,), (0,)))
    turned = run_passes(graph, [turn_weights], "turn")
    prologue, main = split_weights(turned)
    assert [n.op for n in prologue.nodes] == ["transpose"]
    assert sorted(n.op for n in main.nodes) == ["add", "dot_general", "dot_general"]
    assert all(is_linear(n) for n in main.nodes if n.op == "dot_general")
    assert turn_weights(turned) is turned
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 5)).astype(np.float32)
    given = {"x": rng.standard_normal((2, *x[1:])).astype(np.float32)}
    for name, array in interpret(graph, given, lambda _: w).items():
        np.testing.assert_array_equal(interpret(turned, given, lambda _: w)[name], array)


@pytest.mark.parametrize(
    "graph",
    [
        product((ROWS, 4), (5, 4), DotAttrs((1,), (1,))),
        product((ROWS, 4), (4, 5), DotAttrs((1,), (0,)), i32),
        product((ROWS, 4), (4, 5), DotAttrs((1,), (0,)), given=True),
        product((4,), (4, 5), DotAttrs((0,), (0,))),
        product((4, ROWS), (4, 5), DotAttrs((0,), (0,))),
        product((ROWS, 2, 3), (2, 3), DotAttrs((1, 2), (0, 1))),
    ],
    ids=["turned already", "integers", "no weight", "a vector", "over the rows", "over two axes"],
)
def test_other_products_stay(graph):
    assert turn_weights(graph) is graph
