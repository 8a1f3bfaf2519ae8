"""The text form round-trips, and the verifier refuses malformed graphs."""

from dataclasses import replace

import numpy as np
import pytest

from aotc.ir.builder import Builder
from aotc.ir.dtypes import bool_, f32, i32
from aotc.ir.graph import Node, TensorType, Value
from aotc.ir.ops.control import FusionAttrs, IfAttrs
from aotc.ir.ops.decoder import KVAttrs
from aotc.ir.ops.shape import ConstantAttrs, SliceAttrs
from aotc.ir.sizes import Dim, symbol
from aotc.ir.text import parse_graph, print_graph
from aotc.ir.verify import VerifyError, verify

T = symbol("t")


def branch(name, op):
    b = Builder(name)
    x = b.input("x", TensorType(f32, (T, 4)))
    return b.finish({"y": b.emit(op, x)})


def sample_graph():
    b = Builder("sample", [Dim("t", 1, 8)])
    flag = b.input("flag", TensorType(bool_, ()))
    x = b.input("x", TensorType(f32, (T, 4)))
    w = b.weight('odd "key"', TensorType(f32, (4,), None))
    half = b.emit("slice", x, attrs=SliceAttrs((0, 0), (T, 2), (1, 1)), sources=("a/b", "c"))
    chosen = b.emit("if", flag, x, attrs=IfAttrs(branch("neg", "negate"), branch("exp", "exponential")))
    inf = b.emit("constant", attrs=ConstantAttrs(float("-inf"), f32, (T + 1,)))
    fused = b.emit("fusion", x, attrs=FusionAttrs("loops", branch("body", "abs")))
    return b.finish({"half": half, "chosen": chosen, "inf": inf, "w": w, "fused": fused})


def test_print_parse_print():
    graph = sample_graph()
    verify(graph)
    text = print_graph(graph)
    again = parse_graph(text)
    verify(again)
    assert print_graph(again) == text
    assert again.nodes[0].sources == ("a/b", "c")
    assert again.nodes[2].attrs.value == -np.inf


@pytest.mark.parametrize(
    "text",
    [
        "", "graph g {", "graph g { input %x: f33[2] }", "graph g { input %x: f32[2] output \"y\" = %z }",
        "graph g { %x: f32[2] = nothing() }", "graph g { input %x: f32[2 output }", "graph g { } more",
        "graph g { input %x: f32[2] input %x: f32[2] }",
    ],
)  # fmt: skip
def test_malformed_text_is_refused(text):
    with pytest.raises(ValueError):
        parse_graph(text)


def kv_graph(read_old):
    b = Builder("kv", [Dim("t", 1, 8)])
    kv = b.input("kv", TensorType(f32, (2, 2, 1, 16, 4)))
    k = b.input("k", TensorType(f32, (T, 1, 4)))
    at = [b.input(n, TensorType(i32, (s,))) for n, s in (("p", T), ("r", T), ("i", 2))]
    new = b.emit("kv_append", kv, k, k, *at, attrs=KVAttrs())
    outputs = {"kv": new}
    if read_old:
        outputs["old"] = b.emit("negate", kv)
    return b.finish(outputs, (("kv", "kv"),))


def test_a_state_is_not_read_after_its_update():
    verify(kv_graph(False))
    with pytest.raises(VerifyError, match="after its update"):
        verify(kv_graph(True))


def test_faults_are_found():
    graph = sample_graph()
    x = graph.inputs[1]
    stranger = Value("stranger", TensorType(f32, (2,)))
    wrong = Node("negate", (x,), (Value("n", TensorType(f32, (3,))),))
    undeclared = Node(
        "constant", (), (Value("u", TensorType(f32, (symbol("q"),))),), ConstantAttrs(0.0, f32, (symbol("q"),))
    )
    for nodes in (
        (*graph.nodes, Node("negate", (stranger,), (Value("n", stranger.type),))),
        (*graph.nodes, wrong),
        (*graph.nodes, undeclared),
        (*graph.nodes, graph.nodes[0]),
        graph.nodes[1:],
    ):
        with pytest.raises(VerifyError):
            verify(replace(graph, nodes=tuple(nodes)))
