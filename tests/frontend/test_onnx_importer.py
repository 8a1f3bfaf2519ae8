"""The ONNX importer: dims, branches, functions, external data, and files that are damaged or hostile."""

import os
import tracemalloc

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from aotc.errors import AotcError, RequestError, SourceError, UnsupportedError
from aotc.frontend.model import read_logical
from aotc.frontend.onnx import open_onnx
from aotc.ir.interpret import interpret
from aotc.ir.verify import verify


def parse(body, opset=18, more=""):
    """A model from onnx's text form."""
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}{more}]> {body}')


@pytest.fixture
def opened(tmp_path):
    """Writes a model and imports it."""

    def open_(model, dims=None):
        path = tmp_path / "m.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        found = open_onnx(path, dims)
        verify(found.graph)
        return found

    return open_


@pytest.fixture
def check(opened):
    """Imports a model and holds it against onnx's own evaluator on each of the inputs."""

    def check_(model, *feeds, dims=None):
        found = opened(model, dims)
        for feed in feeds:
            got = interpret(found.graph, feed, lambda key: read_logical(found.weights, key))
            wants = ReferenceEvaluator(model).run(None, feed)
            for name, want in zip((o.name for o in model.graph.output), wants, strict=True):
                assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
                np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)
        return found

    return check_


def f32(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Dims


DYNAMIC = """g (float[batch, seq, 4] x, float[seq] s, float[?, 4] z) => (float[batch, seq, 4] y, float[?, 4] t) {
    u = Unsqueeze(s, axis)  v = Mul(x, u)  y = Add(v, one)  t = Relu(z)
}"""


def dynamic_model():
    model = parse(DYNAMIC)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "one"))
    return model


def test_dims_without_bounds_are_refused_with_the_flags_to_paste(opened):
    with pytest.raises(UnsupportedError) as caught:
        opened(dynamic_model())
    assert str(caught.value) == (
        "m.onnx has dynamic dims without bounds: add --dim batch=1..8 --dim seq=1..512 --dim z_0=1..512"
    )
    with pytest.raises(UnsupportedError, match=r"add --dim z_0=1\.\.8$"):
        opened(dynamic_model(), {"batch": (1, 8), "seq": (1, 8)})


def test_dims_take_any_size_within_their_bounds(check):
    def feed(batch, seq, n):
        return {"x": f32(batch, seq, 4), "s": f32(seq, seed=1), "z": f32(n, 4, seed=2)}

    bounds = {"batch": (1, 4), "seq": (0, 9), "z_0": (1, 5)}
    found = check(dynamic_model(), feed(1, 9, 5), feed(4, 1, 1), feed(3, 0, 2), dims=bounds)
    with pytest.raises(TypeError, match="outside"):
        interpret(found.graph, feed(5, 1, 1), lambda key: read_logical(found.weights, key))
    fixed = check(dynamic_model(), feed(2, 3, 4), dims={"batch": (2, 2), "seq": (1, 9), "z_0": (4, 4)})
    assert [d.name for d in fixed.graph.dims] == ["seq"]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"nobody": (1, 2)}, "has no dynamic dim 'nobody'; its dynamic dims: batch, seq, z_0"),
        ({"batch": (5, 4)}, r"batch=5\.\.4: bounds are 0 <= low <= high"),
        ({"batch": (-1, 4)}, r"batch=-1\.\.4"),
        ({"batch": (1, 2**31)}, "batch="),
    ],
)
def test_bounds_that_make_no_sense_are_refused(opened, dims, message):
    with pytest.raises(RequestError, match=message):
        opened(dynamic_model(), {"batch": (1, 8), "seq": (1, 8), "z_0": (1, 8)} | dims)


def test_a_dim_that_is_written_as_a_sum_is_bound_through_its_parts(check):
    model = parse("""g (float[past, 2] c, float[new, 2] x, float[d, 2] whole) => (float[d, 2] y) {
        joined = Concat<axis = 0>(c, x)  y = Add(joined, whole)
    }""")
    model.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "past + new"
    bounds = {"past": (0, 4), "new": (1, 4)}
    check(model, *({"c": f32(p, 2), "x": f32(n, 2), "whole": f32(p + n, 2)} for p, n in ((0, 1), (4, 3))), dims=bounds)


def test_shapes_computed_from_shapes_stay_known(check):
    model = parse("""g (float[batch, seq, 6] x) => (float[a, b, c] y) <int64[1] two = {2}, int64[1] three = {3},
        int64 zero = {0}, int64 one = {1}> {
        shape = Shape(x)  rows = Gather(shape, zero)  columns = Gather(shape, one)  count = Mul(rows, columns)
        line = Unsqueeze(count, axes)  target = Concat<axis = 0>(line, two, three)  y = Reshape(x, target)
    }""")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "axes"))
    check(model, {"x": f32(2, 5, 6)}, {"x": f32(1, 1, 6)}, dims={"batch": (1, 4), "seq": (1, 8)})


def test_sizes_are_elements_too(check):
    """A mean by hand: the count of a dynamic axis reaches the arithmetic."""
    model = parse("""g (float[n, 3] x) => (float[1, 3] y, int64 size) <int64 zero = {0}> {
        total = ReduceSum(x, axes)  shape = Shape(x)  size = Gather(shape, zero)  count = Cast<to = 1>(size)
        y = Div(total, count)
    }""")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "axes"))
    check(model, {"x": f32(7, 3)}, {"x": f32(1, 3)}, dims={"n": (1, 8)})


def test_a_size_that_fills_a_tensor_is_computed_once(check):
    model = parse("g (float[n, 3] x) => (int64[200, 200] y) <int64 zero = {0}, int64[2] wide = {200, 200}> { "
                  "shape = Shape(x)  size = Gather(shape, zero)  y = Expand(size, wide) }")  # fmt: skip
    assert len(check(model, {"x": f32(5, 3)}, dims={"n": (1, 8)}).graph.nodes) < 20


def test_shapes_of_dims_that_do_not_fit_surely_are_a_limit_and_not_damage(opened):
    body = "g (float[a, 3] x, float[b, 3] y) => (float[a, 3] z) { z = Add(x, y) }"
    with pytest.raises(UnsupportedError, match=r"node 'z' \(Add, opset 18\): shapes .* do not broadcast: .*static"):
        opened(parse(body), {"a": (1, 4), "b": (1, 4)})
    with pytest.raises(SourceError, match=r"shapes \[4, 3\] and \[5, 3\] do not broadcast$"):
        opened(parse(body), {"a": (4, 4), "b": (5, 5)})


# Branches and functions


BRANCHES = """g (float[n, 3] x, float limit) => (float[n, 3] y, float[n, 3] z) <float[3] w = {1, -2, 3}> {
    shared = Mul(x, w)
    total = ReduceSum<keepdims = 0>(x)
    big = Greater(total, limit)
    y, z = If (big) <
        then_branch = then () => (float[n, 3] a, float[n, 3] b) { a = Add(shared, w)  b = Identity(x) },
        else_branch = other () => (float[n, 3] c, float[n, 3] d) {
            negative = Less(total, limit)
            c = If (negative) <
                then_branch = in () => (float[n, 3] e) { half = Constant<value = float {0.5}>()  e = Mul(shared, half) },
                else_branch = in2 () => (float[n, 3] f) { f = Sub(x, limit) }
            >
            d = Neg(c)
        }
    >
}"""


def test_both_branches_run_and_branches_nest(check):
    x = np.round(f32(5, 3) * 4)  # whole numbers: their sum is exact
    limits = [x.sum() - 1, x.sum() + 1, x.sum()]
    found = check(parse(BRANCHES), *({"x": x, "limit": np.float32(v)} for v in limits), dims={"n": (1, 8)})
    assert [n.op for n in found.graph.nodes].count("if") == 1


def test_a_known_condition_leaves_one_branch(check):
    model = parse("""g (float[4] x) => (float[4] y) <int64 zero = {0}> {
        shape = Shape(x)  size = Gather(shape, zero)  four = Constant<value_int = 4>()  yes = Equal(size, four)
        y = If (yes) <then_branch = t () => (float[4] a) { a = Relu(x) },
                      else_branch = e () => (float[2] b) { b = Slice(x, zero, zero) }>
    }""")
    found = check(model, {"x": f32(4)})
    assert "if" not in [n.op for n in found.graph.nodes]


def test_branches_of_other_shapes_are_refused(opened):
    model = parse("""g (bool c, float[4] x) => (float[k] y) {
        y = If (c) <then_branch = t () => (float[4] a) { a = Relu(x) },
                    else_branch = e () => (float[1] b) { b = ReduceSum(x) }>
    }""")
    with pytest.raises(UnsupportedError, match=r"its branches give f32\[4\] and f32\[1\]: make the condition"):
        opened(model)


FUNCTIONS = """
<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[4] x) => (float[4] y, float[4] z) { y = local.leaky<slope = 0.25>(x)  z = local.twice(y) }
<domain: "local", opset_import: ["" : 18]> leaky <slope> (a) => (b) { b = LeakyRelu<alpha: float = @slope>(a) }
<domain: "local", opset_import: ["" : 18, "local" : 1]> twice (a) => (c) {
    b = local.leaky<slope = 2.0>(a)  c = Add(b, b)
}
"""


def test_functions_of_the_model_are_inlined_with_their_attributes(opened):
    """Each call with its own slope. onnx's evaluator cannot pass attributes from function to function."""
    got = interpret(opened(parser.parse_model(FUNCTIONS)).graph, {"x": np.float32([-8, -1, 0, 4])})
    assert got["y"].tolist() == [-2, -0.25, 0, 4]
    assert got["z"].tolist() == [-8, -1, 0, 8]


def test_a_function_that_calls_itself_is_refused(opened):
    model = parser.parse_model(FUNCTIONS)
    model.functions[0].node[0].CopyFrom(helper.make_node("leaky", ["a"], ["b"], domain="local"))
    model.functions[0].opset_import.append(helper.make_opsetid("local", 1))
    with pytest.raises(UnsupportedError, match="nests graphs deeper than 24"):
        opened(model)


# Operators that the backend suite has no passing case for


def test_global_lp_pool(opened):
    found, x = opened(parse("g (float[2, 3, 4, 5] x) => (float[2, 3, 1, 1] y) { y = GlobalLpPool<p = 3>(x) }")), f32(2, 3, 4, 5)
    want = (np.abs(x) ** 3).sum((2, 3), keepdims=True) ** (1 / 3)
    np.testing.assert_allclose(interpret(found.graph, {"x": x})["y"], want, rtol=1e-5)


def test_non_zero_of_what_is_known_and_not(check):
    model = parse("g (bool[3] x) => (int64[1, k] y, bool[3] z) <float[4] w = {0, 2, 0, -1}> { y = NonZero(w)  z = Not(x) }")
    check(model, {"x": np.array([True, False, True])})


# Initialisers


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8",
                                   "uint16", "uint32", "uint64", "bool"])  # fmt: skip
def test_initialisers_of_every_type_in_either_field(opened, dtype, raw):
    code = getattr(TensorProto, {"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper()))
    want = np.array([[1, 0, 3], [100, 120, 7]]).astype(helper.tensor_dtype_to_np_dtype(code))
    tensor = (
        numpy_helper.from_array(want, "w") if raw else helper.make_tensor("w", code, want.shape, want.flatten().tolist())
    )
    assert tensor.HasField("raw_data") == raw
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])], "g", [], [helper.make_tensor_value_info("y", code, [2, 3])], [tensor]
    )
    found = opened(helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)]))
    got = interpret(found.graph, {}, lambda key: read_logical(found.weights, key))["y"]
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def external_model(folder, location="weights.bin", offset=64, length=None, name="m.onnx"):
    """A model whose weight, 1 2 3 4, lies at byte 64 of weights.bin."""
    folder.mkdir(exist_ok=True)
    model = parse("g (float[4] x) => (float[4] y) { y = Add(x, w) }")
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": offset, "length": length}
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    (folder / name).write_bytes(model.SerializeToString())
    return folder / name


def write_weights(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(64) + np.arange(1, 5, dtype=np.float32).tobytes())


def runs(path):
    found = open_onnx(path)
    got = interpret(found.graph, {"x": np.zeros(4, np.float32)}, lambda key: read_logical(found.weights, key))["y"]
    assert got.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("length", [None, 16])
def test_external_data_is_read(tmp_path, length):
    write_weights(tmp_path / "weights.bin")
    runs(external_model(tmp_path, length=length))
    write_weights(tmp_path / "deep" / "er" / "weights.bin")
    runs(external_model(tmp_path, "deep/er/weights.bin"))


def test_external_data_in_the_layout_of_a_hub_cache(tmp_path):
    """Files are links to blobs named by hash, the model as well as its data."""
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write_weights(tmp_path / "blobs" / "data")
    external_model(tmp_path / "blobs", name="model")
    (snapshot / "m.onnx").symlink_to("../../blobs/model")
    (snapshot / "weights.bin").symlink_to("../../blobs/data")
    runs(snapshot / "m.onnx")


@pytest.mark.parametrize(
    ("location", "offset", "length", "message"),
    [
        ("../weights.bin", 64, None, "only a path beneath the model is read"),
        ("sub/../../weights.bin", 64, None, "only a path beneath the model is read"),
        ("/etc/passwd", 0, 16, "only a path beneath the model is read"),
        ("", 0, 16, "only a path beneath the model is read"),
        ("missing.bin", 0, 16, "needs the data file missing.bin: No such file"),
        ("link.bin", 64, None, "leads out of the model's folder"),
        ("folder/weights.bin", 64, None, "leads out of the model's folder"),
        ("hard.bin", 64, None, "is a hard link"),
        ("pipe", 0, 16, "is no regular file"),
        (".", 0, 16, "is no regular file"),
        ("good.bin", 64, 12, "holds 12 bytes, its shape"),
        ("good.bin", 65, None, "holds 15 bytes, its shape"),
        ("good.bin", 81, None, "which has 80 bytes"),
        ("good.bin", 2**63, 16, "which has 80 bytes"),
        ("good.bin", "-1", 16, "for an offset or length"),
        ("good.bin", "9" * 30, 16, "for an offset or length"),
        ("good.bin", 64, 2**62, "which has 80 bytes"),
        ("empty.bin", 0, None, "holds 0 bytes, its shape"),
    ],
)
def test_external_data_out_of_place_is_refused(tmp_path, location, offset, length, message):
    outside, folder = tmp_path / "weights.bin", tmp_path / "model"
    write_weights(outside)
    write_weights(folder / "good.bin")
    write_weights(tmp_path / "outside" / "weights.bin")
    (folder / "link.bin").symlink_to(outside)
    (folder / "folder").symlink_to(tmp_path / "outside")
    os.link(outside, folder / "hard.bin")
    os.mkfifo(folder / "pipe")
    (folder / "empty.bin").touch()
    with pytest.raises(SourceError, match=message) as caught:
        found = open_onnx(external_model(folder, location, offset, length))
        found.weights.read("w")
    assert "\n" not in str(caught.value)


def test_sparse_initialisers_are_refused(opened):
    model = parse("g (float[4] x) => (float[4] y) { y = Relu(x) }")
    model.graph.sparse_initializer.add()
    with pytest.raises(UnsupportedError, match="sparse initialisers"):
        opened(model)


# Files that make no model


def node_model(op="Relu", inputs=("x",), **attributes):
    """One node on x f32 [2, 3], and on initialisers that tests add."""
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), ["y"], name="the node", **attributes)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])


def with_weights(model, **arrays):
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items())
    return model


def changed(model, change):
    change(model)
    return model


FAULTS = [
    (b"", SourceError, "is no ONNX file, or is cut off"),
    (b"GGUF" + bytes(100), SourceError, "is no ONNX file, or is cut off"),
    (parse("g (float[2] x) => (float[2] y) { y = Nonsense(x) }"), UnsupportedError,
     r"node 'y' \(Nonsense, opset 18\): aotc does not know this operator"),
    (node_model("FFT", domain="com.microsoft"), UnsupportedError, r"\(FFT, opset 0, domain com.microsoft\)"),
    (node_model("Loop", ["x", "x", "x"], body=helper.make_graph([], "b", [], [])), UnsupportedError, "unrolled"),
    (node_model("Relu", ["ghost"]), SourceError, "uses 'ghost' before it is defined"),
    (node_model("Add", ["x"]), SourceError, r"node 'the node' \(Add, opset 18\) lacks its input B"),
    (node_model("Add", ["x", ""]), SourceError, "lacks its input B"),
    (node_model("Concat", ["x", "", "x"], axis=0), SourceError, "lacks its input inputs"),
    (node_model("Relu", ["x", "x"]), SourceError, "has 2 inputs, and takes 1 at most"),
    (node_model("Concat"), SourceError, "has no attribute axis"),
    (node_model("Concat", axis="zero"), SourceError, "the attribute axis has the wrong type"),
    (node_model("Concat", axis=7), SourceError, "axis 7 of a tensor with 2 axes"),
    (node_model("Cast", to=77), UnsupportedError, "has the element type number 77"),
    (node_model("Cast", to=TensorProto.STRING), UnsupportedError, "has the element type string"),
    (node_model("Cast", to=TensorProto.COMPLEX64), UnsupportedError, "has the element type complex64"),
    (changed(node_model(), lambda m: m.graph.node.append(m.graph.node[0])), SourceError, "defines 'y' twice"),
    (changed(node_model(), lambda m: m.opset_import.pop()), SourceError, "imports no opset"),
    (changed(node_model(), lambda m: setattr(m.opset_import[0], "version", 6)), UnsupportedError,
     "uses ONNX opset 6, aotc reads 7 to 28: convert it with onnx.version_converter"),
    (changed(node_model(), lambda m: setattr(m.opset_import[0], "version", 99)), UnsupportedError, "opset 99"),
    (changed(node_model(), lambda m: m.graph.output.pop()), SourceError, "no graph with outputs"),
    (changed(node_model(), lambda m: m.graph.input[0].type.Clear()), UnsupportedError, "of the kind unknown"),
    (changed(node_model(), lambda m: m.graph.input[0].type.tensor_type.ClearField("shape")), UnsupportedError,
     "input 'x' has no shape"),
    (changed(node_model(), lambda m: setattr(m.graph.node[0], "op_type", "Re\nlu" * 100)), UnsupportedError, r"Re\\nlu"),
    (node_model().SerializeToString().replace(b"the node", b"the \xffode"), SourceError, "not UTF-8"),
    (with_weights(node_model("Reshape", ["x", "s"]), s=np.array([-1, -1])), SourceError, "two open sizes"),
    (with_weights(node_model("Reshape", ["x", "s"]), s=np.array([7])), SourceError, "cannot reshape"),
    (with_weights(node_model("Gather", ["x", "i"]), i=np.array([5])), SourceError, "outside"),
    (node_model("Reshape", ["x", "x"]), UnsupportedError, "'x' is computed at run time, .*make it an initialiser"),
    (with_weights(node_model("Unsqueeze", ["x", "a"]), a=np.zeros(9999, np.int64)), SourceError, "repeat"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "kind", "message"), FAULTS, ids=[str(n) for n in range(len(FAULTS))])
def test_faults_are_named_in_one_line(opened, model, kind, message):
    with pytest.raises(kind, match=message) as caught:
        opened(model)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


HUGE = [
    with_weights(parse("g () => (int64[k] y) { y = Range(a, b, c) }"), a=np.int64(0), b=np.int64(2**62), c=np.int64(1)),
    with_weights(parse("g () => (float[k] y) { y = Range(a, b, c) }"), a=np.float32(0), b=np.float32(1e30),
                 c=np.float32(1e-3)),
    with_weights(parse("g () => (float[k] y) { y = HannWindow(n) }"), n=np.int64(2**40)),
    with_weights(node_model("Pad", ["x", "p"], mode="wrap"), p=np.array([0, 2**40, 0, 0])),
    with_weights(node_model("Expand", ["x", "s"]), s=np.array([2**40, 2, 3])),
    with_weights(node_model("Tile", ["x", "s"]), s=np.array([2**40, 1])),
    with_weights(parse("g () => (float[a, b] y) { y = ConstantOfShape(s) }"), s=np.array([2**40, 2**20])),
    with_weights(parse("g () => (int64 y) { z = ConstantOfShape(s)  y = Size(z) }"), s=np.array([2**40, 2**40])),
    node_model("Split", num_outputs=2**40),
    parse("g (float[3, 4611686018427387904] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }"),
    parse("g (float[0, 2147483648] x) => (float[a, b] y) { y = Hardmax(x) }"),
    with_weights(parse("g (float[1, 1, 4, 4] x) => (float[a, b, c, d] y) { y = Resize(x, , s) }"),
                 s=np.array([1, 1, 1e9, 1e9], np.float32)),
    parse("g (float[1, 1, 8, 8] x) => (float y, int64 i) { y, i = MaxPool<kernel_shape = [2, 2], "
          "pads = [1000000000, 0, 0, 0]>(x) }"),
    parse("g (float[1, 1, 4, 4] x) => (float[a, b, c, d] y) { y = AveragePool<kernel_shape = [30000, 30000], "
          "pads = [15000, 15000, 15000, 15000]>(x) }"),
]  # fmt: skip


@pytest.mark.parametrize("model", HUGE, ids=[m.graph.node[0].op_type for m in HUGE])
def test_numbers_of_the_file_fill_no_memory(opened, model):
    """Each is refused, or read without making the tensor."""
    tracemalloc.start()
    try:
        try:
            opened(model)
        except AotcError as error:
            assert "\n" not in str(error)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


SEEDS = [parse(BRANCHES), parser.parse_model(FUNCTIONS), dynamic_model(), HUGE[0], HUGE[8]]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_and_cuts_give_a_model_or_one_line(opened, data):
    whole = bytearray(data.draw(st.sampled_from(SEEDS)).SerializeToString())
    for place, bit in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), max_size=4)):
        whole[place] ^= 1 << bit
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    bounds = {"batch": (1, 8), "seq": (1, 8), "z_0": (1, 8), "n": (1, 8)}
    for dims in (bounds, {"n": (1, 8)}, {}):
        try:
            opened(bytes(whole[:cut]), dims)
        except AotcError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 700


def test_an_unreadable_file_is_named(tmp_path):
    for path, message in ((tmp_path / "none.onnx", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SourceError, match=message):
            open_onnx(path)
    onnx.save(node_model(), tmp_path / "m.onnx")
    assert open_onnx(tmp_path / "m.onnx").name == "m"
