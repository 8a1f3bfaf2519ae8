"""Attention of encoders: the CPU's kernel, and its spelling in primitives, match the interpreter."""

import numpy as np
import pytest

from aotc.compiler import make_program
from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, f32, i32
from aotc.ir.graph import TensorType
from aotc.ir.ops.encoder import SelfAttentionAttrs
from aotc.ir.program import interpret_program
from aotc.ir.sizes import Dim, symbol
from aotc.ir.templates import Templates
from aotc.passes.pack_weights import is_linear
from aotc.target import CPU_TARGETS, cpu_features

LEVELS = [t.name for t in CPU_TARGETS if t.features <= cpu_features()]
LENGTHS = [70, 1, 33, 0, 64, 99]  # of at most 70: what is less than 1 or more than there are is taken as those


def attention(dtype, heads, d):
    b = Builder("encode", [Dim("batch", 1, 8), Dim("length", 1, 128)])
    batch, length = symbol("batch"), symbol("length")
    qkv = b.input("qkv", TensorType(dtype, (batch, length, 3, heads, d)))
    lengths = b.input("lengths", TensorType(i32, (batch,)))
    return b.finish({"y": b.emit("self_attention", qkv, lengths, attrs=SelfAttentionAttrs(d**-0.5))})


def inputs_of(dtype, heads, d, length=70):
    rng = np.random.default_rng(3)
    qkv = 2 * rng.standard_normal((len(LENGTHS), length, 3, heads, d))
    return {"qkv": qkv.astype(dtype.np), "lengths": np.array(LENGTHS, np.int32)}


@pytest.mark.parametrize("d", [32, 64, 12])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_the_kernel_equals_the_interpreter(check_cpu, level, dtype, d):
    found, program = check_cpu(attention(dtype, 3, d), inputs_of(dtype, 3, d), level=level)
    assert [k.family for k in program.kernels.values()] == ["self_attention"]
    assert found == []


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_without_a_template_it_is_spelt_out(dtype):
    inputs = inputs_of(dtype, 2, 12, 9)
    graph = attention(dtype, 2, 12)
    program = make_program(graph, Templates(is_linear))
    assert {k.family for k in program.kernels.values()} == {"loops"}
    spelt = interpret_program(program, inputs, lambda _: None)["y"].astype(np.float32)
    whole = interpret_program(make_program(graph), inputs, lambda _: None)["y"].astype(np.float32)
    np.testing.assert_allclose(spelt, whole, rtol=0, atol=2e-2 if dtype is bf16 else 1e-6)
    assert not whole[1, 1:].any() and whole[1, 0].all() and whole[3, 0].all()  # past their lengths: zeros
