"""CPU kernels match the interpreter: every op through the loop nest, matmuls with their epilogues, all CPU levels."""

import numpy as np
import pytest
from feed_cases import feed_graph, feed_inputs

from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, bool_, f16, f32, f64, i32, i64, u8
from aotc.ir.graph import TensorType
from aotc.ir.ops import OPS
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import ArgReduceAttrs, ConvAttrs, DotAttrs, PoolAttrs, ReduceAttrs
from aotc.ir.ops.elementwise import CompareAttrs, ConvertAttrs
from aotc.ir.ops.shape import (
    AxesAttrs,
    AxisAttrs,
    BroadcastAttrs,
    ConstantAttrs,
    IotaAttrs,
    PackingAttrs,
    PadAttrs,
    PermutationAttrs,
    ShapeAttrs,
    SliceAttrs,
)
from aotc.ir.sizes import Dim, symbol
from aotc.target import CPU_TARGETS, cpu_features

T = symbol("t")
LEVELS = [t.name for t in CPU_TARGETS if t.features <= cpu_features()]
POSITIVE = {"log", "sqrt", "rsqrt", "acosh"}
BINARY = {"add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum", "atan2"}
UNIT = {"asin", "acos", "atanh"}


def array(rng, type_, op=""):
    shape = [5 if s is T else s for s in type_.shape]
    if type_.dtype == bool_:
        return rng.random(shape) > 0.5
    if not type_.dtype.is_float:
        return rng.integers(0, 7, shape).astype(type_.dtype.np)
    x = rng.standard_normal(shape) * 2
    if op in POSITIVE:
        x = np.abs(x) + 1.1
    if op in UNIT:
        x = np.tanh(x) * 0.9
    return x.astype(type_.dtype.np)


def graph_of(types, make, name="g"):
    b = Builder(name, (Dim("t", 1, 8),))
    values = [b.input(f"x{i}", t) for i, t in enumerate(types)]
    return b.finish(make(b, *values))


def inputs_of(graph, op="", seed=0):
    rng = np.random.default_rng(seed)
    return {v.name: array(rng, v.type, op) for v in graph.inputs}


def test_every_elementwise_op_on_floats(check_cpu):
    """One graph with all of them: an output each, so that a fault names its kernel."""
    b = Builder("elementwise", (Dim("t", 1, 8),))
    type_ = TensorType(f32, (T, 37))
    x, y = b.input("x", type_), b.input("y", type_)
    wide, unit = b.emit("add", b.emit("abs", x), b.emit("constant", attrs=ConstantAttrs(1.1, f32, type_.shape))), None
    unit = b.emit("tanh", x)
    outputs = {}
    skip = {"not", "and", "or", "xor", "shift_left", "shift_right", "compare", "select", "convert"}
    for name, row in OPS.items():
        if row.elementwise and name not in skip:
            first = wide if name in POSITIVE | {"power", "log_plus_one"} else unit if name in UNIT else x
            arity = (
                2
                if name
                in {"add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum", "atan2"}
                else 1
            )
            outputs[name] = b.emit(name, *((first, y)[:arity]))
    assert len(outputs) > 30
    graph = b.finish(outputs)
    found, _ = check_cpu(graph, inputs_of(graph))
    assert found == []


@pytest.mark.parametrize("dtype", [i32, i64, u8])
def test_integer_arithmetic(check_cpu, dtype):
    type_ = TensorType(dtype, (T, 9))
    names = ("add", "subtract", "multiply", "divide", "remainder", "and", "or", "xor", "shift_left", "maximum")
    graph = graph_of([type_, type_], lambda b, x, y: {n: b.emit(n, x, y) for n in names}, name=f"ints_{dtype}")
    found, _ = check_cpu(graph, inputs_of(graph))
    assert found == []


def test_conversions_compare_and_select(check_cpu):
    x = TensorType(f32, (T, 33))

    def make(b, x, y):
        outs = {f"to_{d}": b.emit("convert", x, attrs=ConvertAttrs(d)) for d in (f64, f16, bf16, i32, i64, u8, bool_)}
        masks = {d: b.emit("compare", x, y, attrs=CompareAttrs(d)) for d in ("EQ", "NE", "LT", "LE", "GT", "GE")}
        outs |= masks | {"select": b.emit("select", masks["LT"], x, y), "not": b.emit("not", masks["GE"])}
        return outs | {"back": b.emit("convert", outs["to_i32"], attrs=ConvertAttrs(bf16))}

    graph = graph_of([x, x], make)
    inputs = inputs_of(graph)
    inputs["x0"][0, :6] = [np.nan, np.inf, -np.inf, 3e38, -1e10, 255.7]
    found, _ = check_cpu(graph, inputs)
    assert found == []


def test_views_and_moves(check_cpu):
    x, index = TensorType(f32, (T, 6, 10)), TensorType(i32, (4,))

    def make(b, x, index):
        flat = b.emit("reshape", x, attrs=ShapeAttrs((T, 60)))
        turned = b.emit("transpose", x, attrs=PermutationAttrs((2, 0, 1)))
        cut = b.emit("slice", x, attrs=SliceAttrs((0, 1, 2), (T, 6, 10), (1, 2, 3)))
        return {
            "again": b.emit("negate", b.emit("reshape", flat, attrs=ShapeAttrs((T * 4, 15)))),
            "turned": turned,
            "cut": b.emit("exponential", cut),
            "reverse": b.emit("reverse", x, attrs=AxesAttrs((1, 2))),
            "pad": b.emit("pad", x, attrs=PadAttrs((0, 1, 2), (0, 3, 0), -1.5)),
            "cat": b.emit("concatenate", x, x, b.emit("negate", x), attrs=AxisAttrs(1)),
            "wide": b.emit("broadcast_in_dim", flat, attrs=BroadcastAttrs((2, T, 3, 60), (1, 3))),
            "gather": b.emit("gather", turned, index, attrs=AxisAttrs(2)),
            "iota": b.emit("iota", attrs=IotaAttrs(i64, (T, 5), 1)),
            "fill": b.emit("constant", attrs=ConstantAttrs(float("-inf"), f32, (T, 2))),
        }

    graph = graph_of([x, index], make)
    inputs = inputs_of(graph)
    inputs["x1"] = np.array([5, 0, 3, 3], np.int32)
    found, _ = check_cpu(graph, inputs)
    assert found == []


def test_reductions_and_norms(check_cpu):
    x, w = TensorType(f32, (T, 6, 40)), TensorType(f32, (40,))

    def make(b, x, w):
        kinds = ("sum", "maximum", "minimum", "product")
        axes = ((2,), (0, 1), (1,))
        outs = {f"{k}{a}": b.emit("reduce", x, attrs=ReduceAttrs(k, a)) for k in kinds for a in axes}
        outs["argmax"] = b.emit("arg_reduce", x, attrs=ArgReduceAttrs("maximum", 2))
        outs["argmin_last"] = b.emit("arg_reduce", x, attrs=ArgReduceAttrs("minimum", 1, True))
        outs["rms"] = b.emit("rms_norm", x, w, attrs=NormAttrs(1e-5))
        outs["layer"] = b.emit("layer_norm", b.emit("multiply", x, x), w, w, attrs=NormAttrs(1e-5))
        soft = b.emit("softmax", x, attrs=AxisAttrs(1))
        return outs | {"softmax": soft, "after": b.emit("add", b.emit("softmax", x, attrs=AxisAttrs(2)), x)}

    graph = graph_of([x, w], make)
    found, _ = check_cpu(graph, inputs_of(graph))
    assert found == []


def test_dot_convolution_and_pooling(check_cpu):
    x, w = TensorType(f32, (T, 4, 9, 11)), TensorType(f32, (6, 2, 3, 3))

    def make(b, x, w):
        conv = b.emit("convolution", x, w, attrs=ConvAttrs((2, 1), (1, 2), (1, 0), (1, 2), 2))
        flat = b.emit("reshape", x, attrs=ShapeAttrs((T, 36, 11)))
        return {
            "conv": b.emit("maximum", conv, b.emit("constant", attrs=ConstantAttrs(0.0, f32, conv.type.shape))),
            "max": b.emit("reduce_window", x, attrs=PoolAttrs((2, 2), (1, 1), (1, 1), (1, 1), "maximum", (3, 3))),
            "sum": b.emit("reduce_window", x, attrs=PoolAttrs((1, 2), (0, 1), (0, 0), (2, 1), "sum", (2, 3))),
            "batched": b.emit("dot_general", flat, flat, attrs=DotAttrs((2,), (2,), (0,), (0,))),
        }

    graph = graph_of([x, w], make)
    found, _ = check_cpu(graph, inputs_of(graph))
    assert found == []


def linear_graph(dtype, rows, n, k, epilogue):
    b = Builder(f"linear_{dtype}_{rows}_{n}_{k}_{epilogue}", (Dim("m", rows, rows),))
    m = symbol("m")
    x, w = b.input("x", TensorType(dtype, (m, k))), b.input("w", TensorType(dtype, (n, k)))
    w = b.emit("repack", w, attrs=PackingAttrs("n16k2" if dtype is bf16 else "n16k1"))
    out = b.emit("dot_general", x, w, attrs=DotAttrs((1,), (1,)))
    if epilogue == "bias_residual":
        bias, extra = b.input("bias", TensorType(dtype, (n,))), b.input("extra", TensorType(dtype, (m, n)))
        out = b.emit("add", out, b.emit("broadcast_in_dim", bias, attrs=BroadcastAttrs((m, n), (1,))))
        out = b.emit("add", extra, out)
    if epilogue == "swiglu":
        low = b.emit("slice", out, attrs=SliceAttrs((0, 0), (m, n // 2), (1, 1)))
        high = b.emit("slice", out, attrs=SliceAttrs((0, n // 2), (m, n), (1, 1)))
        out = b.emit("swiglu", low, high)
    return b.finish({"y": out})


SHAPES = (
    (1, 50, 36, ""),
    (3, 64, 33, "bias_residual"),
    (8, 96, 48, "swiglu"),
    (37, 64, 70, "swiglu"),
    (40, 50, 576, "bias_residual"),
)


def packed_weight_input(graph):
    """The graph with its weight as an input in the packed layout, as a program sees it."""
    from dataclasses import replace

    repack = next(n for n in graph.nodes if n.op == "repack")
    inputs = tuple(repack.out if v is repack.inputs[0] else v for v in graph.inputs)
    return replace(graph, inputs=inputs, nodes=tuple(n for n in graph.nodes if n is not repack))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
def test_linear_layers_on_every_level(check_cpu, level, dtype):
    for rows, n, k, epilogue in SHAPES:
        graph = packed_weight_input(linear_graph(dtype, rows, n, k, epilogue))
        rng = np.random.default_rng(rows)
        shapes = {v: [s if isinstance(s, int) else rows for s in v.type.shape] for v in graph.inputs}
        inputs = {v.name: rng.standard_normal(shape).astype(v.type.dtype.np) for v, shape in shapes.items()}
        found, program = check_cpu(graph, inputs, level=level)
        assert [k.family for k in program.kernels.values()] == ["matmul"], "the epilogue was not fused"
        assert found == []


def test_a_wrong_kernel_is_found(check_cpu, monkeypatch):
    """The check itself can fail: a kernel built from a wrong template is named."""
    from aotc.codegen.cpp import CppSyntax

    original = CppSyntax.call

    def wrong(self, op, *rest):
        return original(self, "subtract" if op == "add" else op, *rest)

    monkeypatch.setattr(CppSyntax, "call", wrong)
    type_ = TensorType(f32, (T, 8))
    graph = graph_of([type_, type_], lambda b, x, y: {"y": b.emit("add", x, y)}, name="wrong")
    found, _ = check_cpu(graph, inputs_of(graph))
    assert len(found) == 1 and found[0].relative > 0.1


def test_tokens_come_from_the_history_where_the_host_does_not_know_them(check_cpu):
    found, program = check_cpu(feed_graph(), feed_inputs(), strides={"state": 192})
    assert found == [] and [k.family for k in program.kernels.values()] == ["loops", "sample"]
