"""Small ONNX models, compiled for the CPU, for tests of the runtime."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from aotc.cli import main


def info(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def compiled(folder, nodes, inputs, outputs, weights=(), dims=(), arch="cpu", sizes=None):
    """Where the artifact of a graph lies, made in `folder`. `sizes` are those of --batch-sizes."""
    initial = [numpy_helper.from_array(np.asarray(a), n) for n, a in dict(weights).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initial)
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    bounds = [a for d in dims for a in ("--dim", d)]
    more = [*bounds, *(["--batch-sizes", sizes] if sizes else [])]
    assert main(["compile", str(path), "--arch", arch, *more, "-o", str(folder / "artifact"), "--quiet"]) == 0
    return folder / "artifact"


def two_dims(folder, arch="cpu"):
    """y = sum(relu(x), 1) * scale; x [batch 1..8, time 1..16, 4], scale [batch], y [batch, 4], all f32."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("ReduceSum", ["r", "one"], ["s"], keepdims=0),
        helper.make_node("Unsqueeze", ["scale", "one"], ["column"]),
        helper.make_node("Mul", ["s", "column"], ["y"]),
    ]
    inputs = [info("x", ["batch", "time", 4]), info("scale", ["batch"])]
    weights = {"one": np.array([1], np.int64)}
    return compiled(folder, nodes, inputs, [info("y", ["batch", 4])], weights, ("batch=1..8", "time=1..16"), arch)


def mixed(folder):
    """same = x, y = again = x + 1; f32 [2, 3]."""
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Add", ["x", "one"], ["y"]),
        helper.make_node("Identity", ["y"], ["again"]),
    ]
    outputs = [info(n, [2, 3]) for n in ("same", "y", "again")]
    return compiled(folder, nodes, [info("x", [2, 3])], outputs, {"one": np.float32(1)})
