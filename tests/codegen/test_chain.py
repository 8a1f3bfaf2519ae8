"""Linear layers of few rows in CUDA C++ for Hopper, alone and as phases of one kernel: their source runs on the CPU, on
emulated barriers, copies and products."""

from dataclasses import replace

import pytest
import test_cuda_kernels as kernels
from test_cuda_kernels import linear_graph

from aotc.codegen.cuda import chain
from aotc.codegen.cuda.build import compile_sources
from aotc.codegen.cuda.chain import Width, cost, every, ring, tiles_of
from aotc.codegen.cuda.fake_device import run_program
from aotc.codegen.cuda.launch import dim_order, phases_of, render_program
from aotc.codegen.cuda.schedule import Linear
from aotc.codegen.cuda.tables import Family
from aotc.errors import DeviceError
from aotc.harness import relative_error
from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, f16, f32
from aotc.ir.graph import TensorType
from aotc.ir.interpret import interpret
from aotc.ir.ops.composite import NormAttrs
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.shape import SliceAttrs
from aotc.ir.program import interpret_program
from aotc.ir.sizes import Dim, symbol
from aotc.passes import merge_phases


def layer_graph(dtype, bound, h=128, inner=192, out=96):
    """What follows attention in a decoder: output projection, gated layer, down projection, the next layer's qkv; two
    norms between them, a residual stream in f32."""
    m = symbol("m")
    b = Builder(f"layer_{dtype}_{bound}_{h}_{inner}", (Dim("m", 1, bound),))
    x, stream = b.input("x", TensorType(dtype, (m, h))), b.input("stream", TensorType(f32, (m, h)))

    def linear(value, name, n, k):
        return b.emit("dot_general", value, b.input(name, TensorType(dtype, (n, k))), attrs=DotAttrs((1,), (1,)))

    def norm(value, name):
        return b.emit("rms_norm", value, b.input(name, TensorType(dtype, (h,))), attrs=NormAttrs(1e-5, dtype))

    stream = b.emit("add", stream, b.emit("convert", linear(x, "o", h, h), attrs=ConvertAttrs(f32)))
    both = linear(norm(stream, "norm0"), "gate_up", 2 * inner, h)
    gate, up = (b.emit("slice", both, attrs=SliceAttrs((0, at), (m, at + inner), (1, 1))) for at in (0, inner))
    down = linear(b.emit("swiglu", gate, up), "down", h, inner)
    stream = b.emit("add", stream, b.emit("convert", down, attrs=ConvertAttrs(f32)))
    return b.finish({"stream_out": stream, "qkv": linear(norm(stream, "norm1"), "w_qkv", out, h)})


def check(graph, rows, monkeypatch, most=8, scale=0.2):
    """The merged program on the fake device against the interpreter. Returns the families of its kernels."""
    monkeypatch.setitem(kernels.SIZES, "m", rows)
    inputs = {k: (v * scale).astype(v.dtype) for k, v in kernels.random_inputs(graph).items()}
    program = kernels.program_of(graph)
    program = merge_phases(program, phases_of(program, "sm90"), most)
    expected = interpret(graph, {k: v.copy() for k, v in inputs.items()})
    for found in (interpret_program(program, inputs, {}.get), run_program(program, inputs, {}.get, "sm90")):
        for name, value in expected.items():
            assert relative_error(found[name], value) <= 2e-2, name
    return [program.kernels[c.kernel].family for c in program.calls()]


@pytest.fixture
def forced(monkeypatch):
    """forced(blocks, n of each width of a layer): tiles of so many columns on a card of so many multiprocessors."""

    def force(blocks, widths=None, groups=None, stages=None):
        monkeypatch.setattr(chain, "PROGRAMS", blocks)
        monkeypatch.setattr(chain, "takes", lambda layer, rows: rows > 1)
        if widths is not None:
            widths = {n: w if isinstance(w, Width) else Width(w) for n, w in widths.items()}
            family = Family("phase", Width, lambda arch, of: widths[of.n], lambda arch, of: [])
            monkeypatch.setattr(chain, "PHASE", family)
        real = chain.ring

        def small(*given):
            made = real(*given)
            return made if stages is None else replace(made, stages=min(stages, made.stages))

        if groups is not None:
            monkeypatch.setattr(chain, "GROUPS", groups)
        monkeypatch.setattr(chain, "ring", small)

    return force


@pytest.mark.parametrize(
    ("bound", "rows", "n", "k", "epilogue", "columns", "groups", "stages"),
    [
        (2, 2, 160, 192, "bias_residual", 48, 2, 2),  # products read over the end of the last stage; half a step left
        (64, 50, 96, 64, "", 16, 2, 4),
        (33, 9, 224, 512, "swiglu", 128, 4, 4),
        (33, 9, 224, 512, "swiglu", 96, 2, 3),  # the last tile is cut
        (20, 20, 96, 512, "", 32, 4, 3),
        (20, 20, 256, 128, "bias_residual", 128, 2, 5),  # by columns
        (2, 2, 160, 192, "bias_residual", Width(48, 2), 2, 2),  # one block of a cluster has no depth for its last step
        (64, 50, 96, 512, "", Width(16, 2), 2, 4),
        (33, 9, 192, 512, "bias_residual", Width(96, 2), 2, 3),
        (20, 20, 256, 256, "bias_residual", Width(128, 2), 2, 5),  # by columns
        (64, 64, 96, 384, "bias_residual", Width(64, 2), 4, 3),  # the last tile is cut
    ],
)
def test_one_layer(forced, monkeypatch, bound, rows, n, k, epilogue, columns, groups, stages):
    forced(16 if isinstance(columns, Width) else 4, {n: columns, n // 2: columns}, groups, stages)
    monkeypatch.setitem(kernels.SIZES, "m", rows)
    assert kernels.check(linear_graph(bf16, bound, n, k, epilogue), arch="sm90") == ["matmul"]


@pytest.mark.parametrize(
    ("bound", "rows", "blocks", "widths", "groups", "stages"),
    [
        (8, 5, 8, None, 2, None),
        (64, 50, 5, None, 2, 3),
        (2, 1, 3, {128: 16, 192: 64, 96: 32}, 4, 2),
        (33, 33, 4, {128: 32, 192: 32, 96: 48}, 2, 7),
        (8, 8, 16, {128: 128, 192: 128, 96: 16}, 2, None),  # wide ones too; blocks that have no tile of a phase
    ],
)
def test_phases_of_one_kernel(forced, monkeypatch, bound, rows, blocks, widths, groups, stages):
    forced(blocks, widths, groups, stages)
    assert check(layer_graph(bf16, bound), rows, monkeypatch) == ["chain"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wait_for_blocks(counters + 0, gridDim.x);", ""),
        ("barrier_wait(w_full + stage, parity);", ""),
        ("barrier_wait(x_full + stage, parity);", ""),
        ("barrier_wait(empty + stage, parity ^ 1);", ""),
        ("barrier_wait(scaled + 1, 0);", ""),
        ("tell_blocks(counters + 0)", "tell_blocks(counters + 2)"),
        ("warpgroups_barrier<2, 128 * GROUPS>();", ""),
        ("counters[i] = 0", "counters[i] = 1"),
        ("+ group * P1::OWN_COLUMNS", ""),
    ],
)
def test_what_is_wrong_in_the_template_is_found(forced, broken, monkeypatch, right, wrong):
    """The emulation can fail: without a wait, or with the wrong tile."""
    forced(3, None, 2, 2)
    broken(chain, right, wrong)
    with pytest.raises((AssertionError, DeviceError)):
        check(layer_graph(bf16, 33), 33, monkeypatch, most=2)  # the second kernel finds the counters as the first one leaves them


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("      cluster_wait();  // the other block has begun\n", ""),
        ("      cluster_arrive();\n      cluster_wait();\n", "      warpgroups_barrier<1, 128 * GROUPS>();\n"),
        ("of_block(shares, 1 - rank)", "of_block(shares, rank)"),
        ("(rank * P0::STEPS + step)", "step"),
        ("+ rank * P0::KEPT_COLUMNS", ""),
    ],
)
def test_what_is_wrong_between_blocks_of_a_cluster_is_found(forced, broken, monkeypatch, right, wrong):
    forced(16, {96: Width(32, 2)}, 2, 3)
    broken(chain, right, wrong)
    monkeypatch.setitem(kernels.SIZES, "m", 20)
    with pytest.raises((AssertionError, DeviceError)):
        kernels.check(linear_graph(bf16, 20, 96, 512, "bias_residual"), arch="sm90")


@pytest.mark.parametrize(("bound", "rows", "h"), [(8, 5, 128), (64, 50, 64), (64, 64, 4160)])
def test_norms_between_layers(forced, monkeypatch, bound, rows, h):
    """The first layer adds up squares, the second one scales its sums."""
    forced(8)
    monkeypatch.setitem(kernels.SIZES, "m", rows)
    assert kernels.check(kernels.layers_with_norm(bf16, bound, h, 64), arch="sm90") == ["matmul"] * 2


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_leading_axes(monkeypatch, dtype):
    monkeypatch.setitem(kernels.SIZES, "m", 3)
    assert kernels.check(linear_graph(dtype, 4, 40, 64, "bias_residual", lead=(7,)), arch="sm90") == ["matmul"]


@pytest.mark.parametrize("bound", [2, 32, 64])
def test_phases_of_a_real_shape_assemble(bound):
    """NVRTC takes the source; registers suffice, and all blocks are there at once."""
    program = kernels.program_of(layer_graph(bf16, bound, 4096, 14336, 6144))
    program = merge_phases(program, phases_of(program, "sm90"))
    (source,) = render_program(program, "sm90", dim_order([program]), {}).values()
    (cubin,) = compile_sources([source], "sm90").values()
    assert (cubin.spill_bytes, source.grid, source.together, source.counter_bytes) == (0, (128, 1, 1), True, 16)


@pytest.mark.parametrize(
    ("dtype", "rows", "n", "k", "arch", "language"),
    [
        (bf16, 64, 6144, 64, "sm90", "cuda"), (f16, 2, 4096, 14336, "sm90", "cuda"), (bf16, 8, 2048, 8192, "sm90", "cuda"),
        (bf16, 64, 128256, 64, "sm90", "triton"),  # several waves
        (bf16, 1, 6144, 64, "sm90", "triton"), (f32, 8, 6144, 64, "sm90", "triton"), (bf16, 8, 6144, 60, "sm90", "triton"),
        (bf16, 8, 6144, 64, "sm80", "triton"), (bf16, 8, 6144, 64, "sm100", "triton"),
    ],
)  # fmt: skip
def test_which_layers_it_takes_alone(dtype, rows, n, k, arch, language):
    program = kernels.program_of(linear_graph(dtype, rows, n, k, ""))
    (source,) = render_program(program, arch, dim_order([program]), {}).values()
    assert (source.language, source.together) == (language, False)


@pytest.mark.parametrize("rows", [8, 32, 64])
@pytest.mark.parametrize("h, inner, qkv", [(4096, 14336, 6144), (2048, 8192, 3072)])
def test_the_rule_fills_the_card(rows, h, inner, qkv):
    """Llama shapes: nearly one wave of tiles each, a ring of several stages within the shared memory."""
    made = ((h, h, 1, 16), (inner, h, 2, 1), (h, inner, 1, 16), (qkv, h, 1, 1))
    shapes = [Linear(rows, n, depth, parts, bf16, squares=squares) for n, depth, parts, squares in made]
    widths = [every("sm90", of)[0] for of in shapes]
    for of, width in zip(shapes, widths, strict=True):
        assert 0.7 < tiles_of(of, width.n) * width.splits / 132 <= 1
        assert round(cost(of, width)) == min(round(cost(of, w)) for w in every("sm90", of))
    for some in ([0, 1, 2, 3], [0], [1], [2], [3]):
        made = ring("sm90", [shapes[i] for i in some], [widths[i] for i in some])
        assert made.shared_bytes <= 227 << 10 and made.stages >= 4


@pytest.mark.parametrize("n", [8, 24, 272, 0])
def test_widths_that_the_template_does_not_take(n):
    with pytest.raises(ValueError):
        Width(n)


def test_a_computed_weight_is_no_weight():
    """Weights are fetched before the kernel before has ended, and before a phase begins: what a kernel makes is none."""
    m, dot = symbol("m"), DotAttrs((1,), (1,))
    b = Builder("computed_weight", (Dim("m", 1, 8),))
    a, w0 = b.input("a", TensorType(bf16, (256, 128))), b.input("w0", TensorType(bf16, (192, 128)))
    x = b.input("x", TensorType(bf16, (m, 192)))
    graph = b.finish({"y": b.emit("dot_general", x, b.emit("dot_general", a, w0, attrs=dot), attrs=dot)})
    program = kernels.program_of(graph)
    assert [program.kernels[c.kernel].family for c in program.calls()] == ["matmul", "loops"]


def test_the_key_of_a_schedule_has_all_that_it_depends_on():
    one, other = (Linear(16, 5120, 1024, 1, bf16, squares=squares) for squares in (1, 64))
    assert every("sm90", one)[0] != every("sm90", other)[0] and chain.PHASE.key(one) != chain.PHASE.key(other)
