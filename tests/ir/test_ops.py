"""Ops: composites equal their decompositions, type rules refuse what does not fit."""

import numpy as np
import pytest

from aotc.codegen.loops import to_primitives
from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, f32, i32
from aotc.ir.graph import Attrs, TensorType
from aotc.ir.interpret import interpret
from aotc.ir.ops import OPS
from aotc.ir.ops.composite import NormAttrs, ScaleAttrs, SquaresAttrs
from aotc.ir.ops.contraction import DotAttrs, ReduceAttrs
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.encoder import SelfAttentionAttrs
from aotc.ir.ops.shape import AxisAttrs, BroadcastAttrs, ShapeAttrs, SliceAttrs
from aotc.ir.sizes import Dim, symbol
from aotc.ir.verify import verify

T = symbol("t")
COMPOSITES = {
    "rms_norm": ([(T, 24), (24,)], NormAttrs(1e-5)),
    "sums_of_squares": ([(T, 24)], SquaresAttrs(8)),
    "rms_scale": ([(T, 3)], ScaleAttrs(1.5, 24)),
    "layer_norm": ([(T, 24), (24,), (24,)], NormAttrs(1e-5)),
    "softmax": ([(T, 5, 7)], AxisAttrs(1)),
    "rope": ([(T, 3, 8), (T, 8), (T, 8)], Attrs()),
    "swiglu": ([(T, 24), (T, 24)], Attrs()),
    "self_attention": ([(T, 5, 3, 2, 8), TensorType(i32, (T,))], SelfAttentionAttrs(0.5)),
}


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("op", COMPOSITES)
def test_composite_equals_its_decomposition(op, dtype):
    shapes, attrs = COMPOSITES[op]
    b = Builder("g", [Dim("t", 1, 9)])
    types = [s if isinstance(s, TensorType) else TensorType(dtype, s) for s in shapes]
    inputs = [b.input(f"x{i}", t) for i, t in enumerate(types)]
    graph = b.finish({"y": b.emit(op, *inputs, attrs=attrs)})
    primitives = to_primitives(to_primitives(graph))  # attention's names softmax
    verify(graph)
    verify(primitives.__class__(**{**vars(primitives), "dims": graph.dims}))
    assert not any(OPS[n.op].decompose for n in primitives.nodes)
    rng = np.random.default_rng(0)
    draw = np.abs if op == "rms_scale" else np.asarray  # of sums of squares
    arrays = {
        f"x{i}": draw(rng.standard_normal(t.at({"t": 4}).ints) * (1 if t.dtype.is_float else 4)).astype(t.dtype.np)
        for i, t in enumerate(types)
    }
    whole = interpret(graph, arrays)["y"].astype(np.float64)
    parts = interpret(primitives.__class__(**{**vars(primitives), "dims": graph.dims}), arrays)["y"].astype(np.float64)
    np.testing.assert_allclose(parts, whole, rtol=2e-2 if dtype is bf16 else 1e-5, atol=2e-2 if dtype is bf16 else 1e-6)


def test_every_composite_with_a_decomposition_is_tested():
    assert set(COMPOSITES) == {name for name, row in OPS.items() if row.decompose}


def test_sixteen_bit_floats_accumulate_wide():
    b = Builder("g")
    x = b.input("x", TensorType(bf16, (4096,)))
    graph = b.finish({"y": b.emit("reduce", x, attrs=ReduceAttrs("sum", (0,)))})
    ones = np.ones(4096, bf16.np)
    assert float(ones.sum()) == 256  # what naive numpy says
    assert float(interpret(graph, {"x": ones})["y"]) == 4096


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3.9, 3), (-3.9, -3), (1e30, 2**31 - 1), (-1e30, -(2**31)), (np.nan, 0), (np.inf, 2**31 - 1)],
)
def test_float_to_integer_truncates_and_saturates(value, expected):
    b = Builder("g")
    x = b.input("x", TensorType(f32, (1,)))
    graph = b.finish({"y": b.emit("convert", x, attrs=ConvertAttrs(i32))})
    assert interpret(graph, {"x": np.array([value], np.float32)})["y"][0] == expected


@pytest.mark.parametrize(("a", "b", "quotient", "rest"), [(7, 2, 3, 1), (-7, 2, -3, -1), (7, -2, -3, 1), (5, 0, 0, 0)])
def test_integer_division_is_that_of_c(a, b, quotient, rest):
    builder = Builder("g")
    x, y = (builder.input(n, TensorType(i32, (1,))) for n in "xy")
    graph = builder.finish({"q": builder.emit("divide", x, y), "r": builder.emit("remainder", x, y)})
    out = interpret(graph, {"x": np.array([a], np.int32), "y": np.array([b], np.int32)})
    assert (out["q"][0], out["r"][0]) == (quotient, rest)


@pytest.mark.parametrize(
    ("op", "shapes", "attrs"),
    [
        ("add", [(2, 3), (3, 2)], Attrs()),
        ("reshape", [(2, 3)], ShapeAttrs((7,))),
        ("reshape", [(T, 4)], ShapeAttrs((T, 5))),
        ("broadcast_in_dim", [(3,)], BroadcastAttrs((4, 5), (1,))),
        ("slice", [(4,)], SliceAttrs((2,), (5,), (1,))),
        ("dot_general", [(2, 3), (4, 5)], DotAttrs((1,), (1,))),
        ("rms_norm", [(2, 3), (4,)], NormAttrs(1e-6)),
        ("concatenate", [(2, 3), (3, 4)], AxisAttrs(0)),
    ],
)
def test_type_rules_refuse(op, shapes, attrs):
    with pytest.raises(TypeError):
        OPS[op].infer(tuple(TensorType(f32, s) for s in shapes), attrs)
