"""Tensor models end to end: an ONNX file and a torch.export module become artifacts that numpy calls."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import aotc
from aotc.cli import main
from aotc.errors import RequestError


def onnx_model(path):
    """Conv, If on a reduction of the input, ReduceMean, with a dynamic batch."""
    rng = np.random.default_rng(0)

    def initial(name, array):
        return numpy_helper.from_array(array, name)

    def info(name, shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    then = helper.make_graph([helper.make_node("Relu", ["c"], ["t"])], "then", [], [info("t", None)])
    orelse = helper.make_graph([helper.make_node("Neg", ["c"], ["e"])], "else", [], [info("e", None)])
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["chosen"], then_branch=then, else_branch=orelse),
        helper.make_node("ReduceMean", ["chosen", "axes"], ["y"], keepdims=0),
    ]
    weights = [
        initial("w", rng.standard_normal((4, 3, 3, 3)).astype(np.float32)),
        initial("b", rng.standard_normal(4).astype(np.float32)),
        initial("zero", np.array(0, np.float32)),
        initial("axes", np.array([2, 3], np.int64)),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", ["batch", 3, 8, 8])], [info("y", ["batch", 4])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return model


def test_onnx_with_conv_if_and_dynamic_batch(tmp_path, capsys):
    source, folder = tmp_path / "m.onnx", str(tmp_path / "artifact")
    model = onnx_model(source)
    assert main(["compile", str(source), "--arch", "cpu", "-o", folder]) == 2
    assert "--dim batch=1..8" in capsys.readouterr().err
    assert not (tmp_path / "artifact").exists()
    assert main(["compile", str(source), "--arch", "cpu", "--dim", "batch=1..8", "-o", folder, "--quiet"]) == 0
    compiled, reference = aotc.load(folder), ReferenceEvaluator(model)
    rng = np.random.default_rng(1)
    for batch in (1, 3, 8):
        for sign in (1, -1):  # both branches
            x = (np.abs(rng.standard_normal((batch, 3, 8, 8))) * sign).astype(np.float32)
            (expected,) = reference.run(None, {"x": x})
            np.testing.assert_allclose(compiled(x=x)["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((9, 3, 8, 8), np.float32, "batch is 9"),
        ((2, 3, 8, 8), np.float64, "float64"),
        ((2, 3, 8), np.float32, "3 axes"),
        ((2, 3, 8, 7), np.float32, "shape"),
    ],
)
def test_calls_are_checked(tmp_path, shape, dtype, message):
    onnx_model(tmp_path / "m.onnx")
    folder = str(tmp_path / "artifact")
    assert (
        main(["compile", str(tmp_path / "m.onnx"), "--arch", "cpu", "--dim", "batch=1..8", "-o", folder, "--quiet"])
        == 0
    )
    model = aotc.load(folder)
    with pytest.raises(RequestError, match=message):
        model(x=np.zeros(shape, dtype))
    with pytest.raises(RequestError, match="x is missing"):
        model(z=np.zeros((2, 3, 8, 8), np.float32))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.inner, self.layer_norm, self.out = nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, image, scale):
        x = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        x = self.layer_norm(nn.functional.gelu(self.inner(x))) * scale[:, None]
        return torch.softmax(self.out(x), -1), x[:, ::2].argmax(-1)


def test_torch_export_module(tmp_path):
    torch.manual_seed(0)
    module = Small().eval()
    batch = torch.export.Dim("batch", min=1, max=6)
    example = (torch.randn(4, 3, 10, 10), torch.randn(4))
    program = torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))
    aotc.compile(program, tmp_path / "artifact", name="small")
    model = aotc.load(tmp_path / "artifact")
    for n in (1, 6):
        image, scale = torch.randn(n, 3, 10, 10), torch.randn(n)
        with torch.no_grad():
            probabilities, index = module(image, scale)
        got = model(image=image.numpy(), scale=scale.numpy())
        np.testing.assert_allclose(got["output_0"], probabilities.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(got["output_1"], index.numpy())
    with pytest.raises(RequestError, match="another input"):
        model(image=np.zeros((2, 3, 10, 10), np.float32), scale=np.zeros(3, np.float32))


@pytest.mark.parametrize("node", [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Gemm", ["x", "w"], ["y"])])
def test_onnx_products_have_the_kernels_of_linear_layers(tmp_path, node):
    """Whose weights are [N, K], while ONNX's are [K, N]."""
    w = np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", s]) for n, s in (("x", 48), ("y", 40)))
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(w, "w")])
    path, folder = tmp_path / "m.onnx", str(tmp_path / "artifact")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    assert main(["compile", str(path), "--arch", "cpu", "--dim", "batch=1..8", "-o", folder, "--quiet"]) == 0
    with aotc.load(folder, device="cpu") as compiled:
        assert [k.family for k in compiled.plan.kernels] == ["matmul"]
        given = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
        np.testing.assert_allclose(compiled(x=given)["y"], given @ w, rtol=1e-4, atol=1e-5)
