"""CUDA kernels match the interpreter: their Triton source runs on the CPU, on memory with guards."""

import numpy as np
import pytest
from attention_cases import SLOTS, attention_graph, page_up, ragged
from feed_cases import feed_graph, feed_inputs

from aotc.codegen.cuda import schedule
from aotc.codegen.cuda.fake_device import run_program
from aotc.codegen.cuda.launch import dim_order, render_program, slot_layout
from aotc.codegen.cuda.render import TEMPLATES
from aotc.compiler import make_program
from aotc.errors import DeviceError, UnsupportedError
from aotc.harness import relative_error
from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, bool_, f16, f32, f64, i8, i32, i64, u8
from aotc.ir.graph import TensorType
from aotc.ir.interpret import interpret
from aotc.ir.ops import OPS
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import ArgReduceAttrs, ConvAttrs, DotAttrs, PoolAttrs, ReduceAttrs, ScanAttrs
from aotc.ir.ops.elementwise import CompareAttrs, ConvertAttrs
from aotc.ir.ops.shape import (
    AxesAttrs,
    AxisAttrs,
    BroadcastAttrs,
    ConstantAttrs,
    IotaAttrs,
    PadAttrs,
    PermutationAttrs,
    ShapeAttrs,
    SliceAttrs,
)
from aotc.ir.sizes import Dim, symbol

T = symbol("t")
SIZES = {"t": 3, "m": 5, "tokens": 11, "rows": 4, "slots": SLOTS}
TOLERANCE = {f64: 1e-9, f32: 2e-5, f16: 5e-3, bf16: 2e-2}
POSITIVE = {"log", "sqrt", "rsqrt", "acosh", "power", "log_plus_one"}
BINARY = {"add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum", "atan2"}
UNIT = {"asin", "acos", "atanh"}
NOT_FLOAT = {"not", "and", "or", "xor", "shift_left", "shift_right", "compare", "select", "convert"}


def program_of(graph):
    """A planned program for CUDA: linear layers are those of the matmul template."""
    return make_program(graph, TEMPLATES)


def random_inputs(graph, seed=0, **given):
    rng = np.random.default_rng(seed)

    def make(type_):
        shape = type_.at(SIZES).shape
        if type_.dtype == bool_:
            return rng.random(shape) > 0.5
        if not type_.dtype.is_float:
            return rng.integers(0, 7, shape).astype(type_.dtype.np)
        return (rng.standard_normal(shape) * 2).astype(type_.dtype.np)

    return {v.name: given[v.name] if v.name in given else make(v.type) for v in graph.inputs}


def check(graph, inputs=None, arch="sm80", **given):
    """Every output of the graph on the fake device against the interpreter. Returns the families of its kernels."""
    inputs = random_inputs(graph, **given) if inputs is None else inputs
    program = program_of(graph)
    got = run_program(program, inputs, lambda key: pytest.fail(f"no weight {key}"), arch)
    expected = interpret(graph, {k: v.copy() for k, v in inputs.items()})
    assert got.keys() == expected.keys()
    loosest = max(TOLERANCE.get(v.type.dtype, 0.0) for v in graph.values())
    for name, value in expected.items():
        limit = loosest if graph.output(name).type.dtype.is_float else 0.0
        assert got[name].dtype == value.dtype and got[name].shape == value.shape
        assert relative_error(got[name], value) <= limit, f"{graph.name}: {name}"
    return [program.kernels[c.kernel].family for c in program.calls()]


def graph_of(types, make, name="g"):
    b = Builder(name, (Dim("t", 1, 8),))
    values = [b.input(f"x{i}", t) for i, t in enumerate(types)]
    return b.finish(make(b, *values))


@pytest.mark.parametrize("dtype", [f32, f64, bf16])
def test_every_elementwise_op_on_floats(dtype):
    b = Builder(f"elementwise_{dtype}", (Dim("t", 1, 8),))
    type_ = TensorType(dtype, (T, 37))
    x, y = b.input("x", type_), b.input("y", type_)
    large = b.emit("add", b.emit("abs", x), b.emit("constant", attrs=ConstantAttrs(1.1, dtype, type_.shape)))
    half = b.emit("constant", attrs=ConstantAttrs(0.5, dtype, type_.shape))
    small = b.emit("multiply", b.emit("tanh", x), half)
    outputs = {}
    for name, row in OPS.items():
        if row.elementwise and name not in NOT_FLOAT:
            first = large if name in POSITIVE else small if name in UNIT else x
            outputs[name] = b.emit(name, *(first, y) if name in BINARY else (first,))
    assert len(outputs) > 30
    check(b.finish(outputs))


@pytest.mark.parametrize("dtype", [i32, i64, u8, i8])
def test_integer_arithmetic(dtype):
    type_ = TensorType(dtype, (T, 9))
    names = (
        "add", "subtract", "multiply", "divide", "remainder", "and", "or", "xor", "shift_left", "shift_right",
        "maximum", "minimum",
    )  # fmt: skip

    def make(b, x, y):
        unary = ("abs", "sign", "not") if dtype is u8 else ("abs", "sign", "not", "negate")
        return {n: b.emit(n, x, y) for n in names} | {n: b.emit(n, x) for n in unary}

    x = np.array([[7, 5, 0, 100, 3, 1, 2, 6, 4]] * SIZES["t"]).astype(dtype.np)
    check(graph_of([type_, type_], make, f"ints_{dtype}"), x0=x if dtype is u8 else x - dtype.np.type(4))


def test_conversions_compare_and_select():
    x = TensorType(f32, (T, 33))

    def make(b, x, y):
        outs = {f"to_{d}": b.emit("convert", x, attrs=ConvertAttrs(d)) for d in (f64, f16, bf16, i32, i64, u8, bool_)}
        masks = {d: b.emit("compare", x, y, attrs=CompareAttrs(d)) for d in ("EQ", "NE", "LT", "LE", "GT", "GE")}
        outs |= masks | {"select": b.emit("select", masks["LT"], x, y), "not": b.emit("not", masks["GE"])}
        outs |= {n: b.emit(n, masks["LT"], masks["NE"]) for n in ("and", "or", "xor")}
        return outs | {"back": b.emit("convert", outs["to_i32"], attrs=ConvertAttrs(bf16))}

    x0 = np.random.default_rng(1).standard_normal((SIZES["t"], 33)).astype(np.float32)
    x0[0, :7] = [np.nan, np.inf, -np.inf, 3e38, -1e10, 255.7, -0.5]
    check(graph_of([x, x], make, "conversions"), x0=x0)


def test_views_and_moves():
    x, index = TensorType(f32, (T, 6, 10)), TensorType(i32, (4,))

    def make(b, x, index):
        flat = b.emit("reshape", x, attrs=ShapeAttrs((T, 60)))
        turned = b.emit("transpose", x, attrs=PermutationAttrs((2, 0, 1)))
        cut = b.emit("slice", x, attrs=SliceAttrs((0, 1, 2), (T, 6, 10), (1, 2, 3)))
        places = b.emit("convert", b.emit("abs", b.emit("sine", x)), attrs=ConvertAttrs(i64))
        return {
            "again": b.emit("negate", b.emit("reshape", flat, attrs=ShapeAttrs((T * 4, 15)))),
            "turned": turned,
            "cut": b.emit("exponential", cut),
            "reverse": b.emit("reverse", x, attrs=AxesAttrs((1, 2))),
            "pad": b.emit("pad", x, attrs=PadAttrs((0, 1, 2), (0, 3, 0), -1.5)),
            "cat": b.emit("concatenate", x, x, b.emit("negate", x), attrs=AxisAttrs(1)),
            "wide": b.emit("broadcast_in_dim", flat, attrs=BroadcastAttrs((2, T, 3, 60), (1, 3))),
            "gather": b.emit("gather", turned, index, attrs=AxisAttrs(2)),
            "elements": b.emit("gather_elements", x, places, attrs=AxisAttrs(2)),
            "iota": b.emit("iota", attrs=IotaAttrs(i64, (T, 5), 1)),
            "fill": b.emit("constant", attrs=ConstantAttrs(float("-inf"), f32, (T, 2))),
            "copy": x,
        }

    check(graph_of([x, index], make, "views"), x1=np.array([5, 0, 3, 3], np.int32))


@pytest.mark.parametrize("dtype", [f32, bf16, i32])
def test_reductions(dtype):
    x = TensorType(dtype, (T, 6, 40))

    def make(b, x):
        kinds = ("sum", "maximum", "minimum", *(["product"] if dtype is f32 else []))
        axes = ((2,), (0, 1), (1,), (1, 2), (0, 1, 2))
        outs = {f"{k}{a}": b.emit("reduce", x, attrs=ReduceAttrs(k, a)) for k in kinds for a in axes[: 5 if k == "sum" else 3]}
        outs["argmax"] = b.emit("arg_reduce", x, attrs=ArgReduceAttrs("maximum", 2))
        outs["argmax_last"] = b.emit("arg_reduce", x, attrs=ArgReduceAttrs("maximum", 2, True))
        outs["argmin_last"] = b.emit("arg_reduce", x, attrs=ArgReduceAttrs("minimum", 1, True))
        zero = b.emit("constant", attrs=ConstantAttrs(0, dtype, x.type.shape))
        positive = b.emit("compare", x, zero, attrs=CompareAttrs("GT"))
        return outs | {k: b.emit("reduce", positive, attrs=ReduceAttrs(k, (2,))) for k in ("and", "or")}

    x0 = np.random.default_rng(2).integers(-9, 9, (SIZES["t"], 6, 40)).astype(dtype.np)  # many equal elements
    check(graph_of([x], make, f"reductions_{dtype}"), x0=x0)


def test_nan_goes_through_reductions():
    x = TensorType(f32, (T, 40))

    def make(b, x):
        outs = {k: b.emit("reduce", x, attrs=ReduceAttrs(k, (1,))) for k in ("sum", "maximum", "minimum")}
        return outs | {"where": b.emit("arg_reduce", x, attrs=ArgReduceAttrs("maximum", 1))}

    x0 = np.ones((SIZES["t"], 40), np.float32)
    x0[1, 7], x0[1, 9], x0[2] = np.inf, np.nan, -np.inf
    check(graph_of([x], make, "nan"), x0=x0)


@pytest.mark.parametrize("width", [40, 576, 9000])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_norms_and_softmax_of_rows(dtype, width):
    """9000 is longer than a block: rows are walked."""
    x, w = TensorType(dtype, (T, width)), TensorType(dtype, (width,))

    def make(b, x, w):
        soft = b.emit("softmax", x, attrs=AxisAttrs(1))
        return {
            "rms": b.emit("rms_norm", x, w, attrs=NormAttrs(1e-5)),
            "layer": b.emit("layer_norm", b.emit("multiply", x, x), w, w, attrs=NormAttrs(1e-5)),
            "softmax": soft,
            "after": b.emit("add", b.emit("softmax", b.emit("negate", x), attrs=AxisAttrs(1)), x),
            "argmax": b.emit("arg_reduce", x, attrs=ArgReduceAttrs("maximum", 1)),
        }

    check(graph_of([x, w], make, f"rows_{dtype}_{width}"))


def test_softmax_along_other_axes():
    x = TensorType(f32, (T, 6, 10))
    check(graph_of([x], lambda b, x: {"y": b.emit("softmax", x, attrs=AxisAttrs(1))}, "inner"))


def test_dot_convolution_and_pooling():
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

    check(graph_of([x, w], make, "windows"))


def linear_graph(dtype, bound, n, k, epilogue, lead=()):
    b = Builder(f"linear_{dtype}_{bound}_{n}_{k}_{epilogue}", (Dim("m", 1, bound),))
    shape = (symbol("m"), *lead)
    x, w = b.input("x", TensorType(dtype, (*shape, k))), b.input("w", TensorType(dtype, (n, k)))
    if epilogue.startswith("norm"):
        x = b.emit("rms_norm", x, b.input("scale", TensorType(dtype, (k,))), attrs=NormAttrs(1e-5, None))
    out = b.emit("dot_general", x, w, attrs=DotAttrs((len(shape),), (1,)))
    if epilogue == "bias_residual":
        bias, extra = b.input("bias", TensorType(dtype, (n,))), b.input("extra", TensorType(f32, (*shape, n)))
        out = b.emit("add", out, b.emit("broadcast_in_dim", bias, attrs=BroadcastAttrs((*shape, n), (len(shape),))))
        out = b.emit("add", extra, b.emit("convert", out, attrs=ConvertAttrs(f32)))
    if epilogue.endswith("swiglu"):
        low = b.emit("slice", out, attrs=SliceAttrs((0, 0), (symbol("m"), n // 2), (1, 1)))
        high = b.emit("slice", out, attrs=SliceAttrs((0, n // 2), (symbol("m"), n), (1, 1)))
        out = b.emit("swiglu", low, high)
    return b.finish({"y": out})


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize(
    ("bound", "rows", "n", "k", "epilogue"),
    [
        (1, 1, 50, 36, ""),
        (1, 1, 64, 70, "norm_swiglu"),
        (1, 1, 10, 4100, "norm"),
        (4, 3, 96, 576, "bias_residual"),
        (16, 5, 64, 3000, "swiglu"),
        (6, 5, 24, 8, ""),
        (6, 5, 1, 1, "bias_residual"),
        (90, 77, 3, 3, ""),
        (64, 50, 20, 70, ""),
        (3, 2, 64, 70, "swiglu"),
        (16, 5, 96, 576, "swiglu"),
        (90, 77, 50, 33, "bias_residual"),
        (140, 133, 96, 136, "swiglu"),
    ],
)
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_linear_layers(dtype, bound, rows, n, k, epilogue, arch, monkeypatch):
    """Few rows and many, more rows in the program than in the step, sizes that are no powers of two."""
    monkeypatch.setitem(SIZES, "m", rows)
    assert check(linear_graph(dtype, bound, n, k, epilogue), arch=arch) == ["matmul"], "not one kernel"


def layers_with_norm(dtype, bound, h, n, lead=()):
    """A residual stream that a linear layer adds to, normalised for a gated layer, and read once more."""
    b = Builder(f"norm_between_{dtype}_{bound}_{h}", (Dim("m", 1, bound),))
    shape = (symbol("m"), *lead)
    x, stream = b.input("x", TensorType(dtype, (*shape, 24))), b.input("stream", TensorType(f32, (*shape, h)))
    first, second = b.input("first", TensorType(dtype, (h, 24))), b.input("second", TensorType(dtype, (n, h)))
    dot = DotAttrs((len(shape),), (1,))
    made = b.emit("convert", b.emit("dot_general", x, first, attrs=dot), attrs=ConvertAttrs(f32))
    made = b.emit("add", stream, made)
    normal = b.emit("rms_norm", made, b.input("scale", TensorType(dtype, (h,))), attrs=NormAttrs(1e-5, dtype))
    out = b.emit("dot_general", normal, second, attrs=dot)
    half = [b.emit("slice", out, attrs=SliceAttrs((0,) * len(shape) + (at,), (*shape, at + n // 2), (1,) * (len(shape) + 1)))
            for at in (0, n // 2)]  # fmt: skip
    return b.finish({"stream": made, "y": b.emit("swiglu", *half)})


@pytest.mark.parametrize(
    ("dtype", "bound", "rows", "h", "lead", "kernels"),
    [
        (bf16, 9, 5, 192, (), 2),  # three groups of 64 squares
        (bf16, 64, 50, 96, (), 2),  # groups of 32, two tiles
        (f32, 3, 2, 160, (), 2),
        (f32, 5, 4, 64, (2,), 2),
        (f16, 9, 5, 192, (), 3),  # x * g may overflow
        (bf16, 9, 5, 200, (), 3),  # no whole groups
        (bf16, 90, 70, 192, (), 3),  # too many rows
        (bf16, 1, 1, 192, (), 2),  # the second normalises its row itself
    ],
)
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_a_norm_between_linear_layers(dtype, bound, rows, h, lead, kernels, arch, monkeypatch):
    monkeypatch.setitem(SIZES, "m", rows)
    families = check(layers_with_norm(dtype, bound, h, 64, lead), arch=arch)
    assert len(families) == kernels
    assert families.count("matmul") == 2


@pytest.mark.parametrize("bound", [2, 9])
def test_linear_layer_with_two_leading_axes(bound, monkeypatch):
    monkeypatch.setitem(SIZES, "m", 2)
    assert check(linear_graph(f32, bound, 20, 24, "bias_residual", lead=(2,))) == ["matmul"]


@pytest.mark.parametrize(("dtype", "page_size"), [(f32, None), (bf16, None), (f32, 16), (bf16, 64)])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "window"), [(9, 3, 64, None), (4, 4, 24, 5), (6, 1, 16, 70)])
def test_attention_of_one_token_a_row(dtype, heads, kv_heads, d, window, page_size):
    graph = attention_graph(dtype, heads, kv_heads, d, window, decode=True, rope=True)
    inputs = random_inputs(graph, **ragged([1, 79, 64, 7], [1, 1, 1, 1]))
    assert check(*page_up(graph, inputs, page_size)) == ["attention_decode"]


@pytest.mark.parametrize(("dtype", "page_size"), [(f32, None), (bf16, None), (f32, 16), (bf16, 64)])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "window"), [(9, 3, 24, None), (4, 4, 16, 5), (2, 1, 48, 33)])
def test_attention_of_ragged_rows(dtype, heads, kv_heads, d, window, page_size, monkeypatch):
    """Rows longer than a tile of queries, rows of one token, and one without any."""
    monkeypatch.setitem(SIZES, "tokens", 80)
    graph = attention_graph(dtype, heads, kv_heads, d, window, decode=False)
    inputs = random_inputs(graph, **ragged([70, 6, 80, 9], [70, 0, 1, 9]))
    check(*page_up(graph, inputs, page_size))


def test_what_has_no_template_is_refused():
    x = TensorType(f32, (T, 6))
    graph = graph_of([x], lambda b, x: {"y": b.emit("scan", x, attrs=ScanAttrs("sum", 1))}, "scan")
    with pytest.raises(UnsupportedError, match="no CUDA template for scan"):
        check(graph)


def test_a_wrong_kernel_is_found(monkeypatch):
    """The check itself can fail: on a wrong operator, and on a store behind the end of the output."""
    from aotc.codegen.cuda.syntax import TritonSyntax

    call, store = TritonSyntax.call, TritonSyntax.store
    type_ = TensorType(f32, (T, 8))
    graph = graph_of([type_, type_], lambda b, x, y: {"y": b.emit("add", x, y)}, "wrong")
    monkeypatch.setattr(TritonSyntax, "call", lambda self, op, *rest: call(self, "subtract", *rest))
    with pytest.raises(AssertionError, match="wrong: y"):
        check(graph)
    monkeypatch.setattr(TritonSyntax, "store", lambda self, p, t, at, v, mask="": store(self, p, t, f"{at} + 4", v, mask))
    with pytest.raises(DeviceError, match="wrote outside of out.y"):
        check(graph)


def test_tokens_come_from_the_history_where_the_host_does_not_know_them():
    assert check(feed_graph(), feed_inputs()) == ["loops", "sample"]


@pytest.mark.parametrize(("most_rows", "parts"), [(8, 4), (128, 2), (512, 1)])
def test_programs_share_the_search_for_the_best_logit(monkeypatch, most_rows, parts):
    """Of equal ones the first wins, in whichever part it lies."""
    monkeypatch.setattr(schedule, "SAMPLE_CHUNK", 16)
    graph, inputs = feed_graph(most_rows), feed_inputs()
    inputs["logits"][:, [3, 20, 49]] = 0
    for row, best in enumerate(([49], [20, 49], [3, 49], [3, 20])):
        inputs["logits"][row, best] = 9
    program = program_of(graph)
    sources = render_program(program, "sm80", dim_order([program]), slot_layout(program).strides).values()
    assert {s.grid[1] for s in sources if s.symbol.startswith("sample")} == {parts}
    check(graph, inputs)


def test_loops_that_wait_for_nothing_are_one_kernel():
    """Outputs of several sizes, one that others read too, one that is used within alone, and one that waits."""
    b = Builder("first", (Dim("t", 1, 3000),))
    x, y = b.input("x", TensorType(f32, (T, 700))), b.input("y", TensorType(i32, (T,)))
    doubled = b.emit("add", x, x)  # read here and by what waits
    inner = b.emit("exponential", b.emit("convert", y, attrs=ConvertAttrs(f32)))  # read twice, here alone
    sine, cosine = b.emit("sine", inner), b.emit("cosine", inner)
    total = b.emit("reduce", doubled, attrs=ReduceAttrs("sum", (1,)))
    graph = b.finish({"doubled": doubled, "sine": sine, "cosine": cosine, "after": b.emit("add", total, sine)})
    assert check(graph, arch="sm90") == ["side_by_side", "loops"]
    assert check(graph) == ["side_by_side", "loops"]
    alone = Builder("alone", (Dim("t", 1, 3000),))
    x = alone.input("x", TensorType(f32, (T, 5)))
    assert check(alone.finish({"y": alone.emit("sine", x)})) == ["loops"]
