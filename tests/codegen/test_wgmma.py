"""The matmul of CUDA C++ for Hopper for many rows: its source runs on the CPU, on emulated barriers, copies and products."""

import pytest
import test_cuda_kernels as kernels
from test_cuda_kernels import check, linear_graph

from aotc.codegen.cuda import wgmma
from aotc.codegen.cuda.build import compile_sources
from aotc.codegen.cuda.launch import dim_order, render_program
from aotc.codegen.cuda.nvrtc import compile_cuda
from aotc.codegen.cuda.schedule import Linear
from aotc.codegen.cuda.tables import Family
from aotc.codegen.cuda.wgmma import Tile, cost, every, rule, staged, tiles_of
from aotc.errors import CompilerError
from aotc.ir.builder import Builder
from aotc.ir.dtypes import bf16, bool_, f16, f32
from aotc.ir.graph import TensorType
from aotc.ir.ops import OPS
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.shape import ConstantAttrs
from aotc.ir.sizes import Dim, symbol


@pytest.fixture
def forced(monkeypatch):
    """forced(tile, blocks): all layers get this tile on a card of so many multiprocessors."""

    def force(tile, blocks=8):
        family = Family("wgmma", Tile, lambda arch, of: tile, lambda arch, of: [])
        monkeypatch.setattr(wgmma, "WGMMA", family)
        monkeypatch.setattr(wgmma, "PROGRAMS", blocks)

    return force


@pytest.mark.parametrize(
    ("bound", "rows", "n", "k", "epilogue", "columns", "stages"),
    [
        (300, 300, 160, 192, "bias_residual", 48, 2),  # tiles and steps in turns, a tail in every direction
        (512, 270, 96, 64, "", 16, 4),  # fewer rows than memory, fewer steps than stages
        (130, 129, 224, 128, "swiglu", 112, 3),
    ],
)
def test_many_tiles(forced, monkeypatch, bound, rows, n, k, epilogue, columns, stages):
    forced(Tile(columns, stages), blocks=4)
    monkeypatch.setitem(kernels.SIZES, "m", rows)
    assert check(linear_graph(bf16, bound, n, k, epilogue), arch="sm90") == ["matmul"]


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_leading_axes(monkeypatch, dtype):
    monkeypatch.setitem(kernels.SIZES, "m", 70)
    assert check(linear_graph(dtype, 90, 40, 64, "bias_residual", lead=(7,)), arch="sm90") == ["matmul"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("barrier_wait(full + stage, parity);", ""),
        ("barrier_wait(empty + stage, parity);", ""),
        ("block * COLUMNS +", "block * COLUMNS + 8 +"),
        ("if (++stage == STAGES) stage = 0, parity ^= 1;", "if (++stage == STAGES) stage = 0;"),
    ],
)
def test_what_is_wrong_in_the_template_is_found(forced, broken, monkeypatch, right, wrong):
    """The emulation can fail: without a wait, or with the wrong tile."""
    forced(Tile(32, 2), blocks=4)
    monkeypatch.setitem(kernels.SIZES, "m", 300)
    broken(wgmma, right, wrong)
    with pytest.raises((AssertionError, kernels.DeviceError)):
        check(linear_graph(bf16, 300, 160, 192, ""), arch="sm90")


@pytest.mark.parametrize("n", [16, 96, 224, 256])
def test_every_tile_assembles(forced, n):
    """NVRTC takes the source; registers of the warps that multiply suffice."""
    forced(staged("sm90", n))
    program = kernels.program_of(linear_graph(bf16, 512, 1024, 512, "swiglu"))
    sources = render_program(program, "sm90", dim_order([program]), {}).values()
    assert [s.language for s in sources] == ["cuda"]
    (cubin,) = compile_sources(sources, "sm90").values()
    assert (cubin.spill_bytes, cubin.num_warps) == (0, 12)
    (tile,) = (m for m in next(iter(sources)).maps if m.argument == 1)
    assert (tile.rows, tile.columns, tile.box_rows, tile.box_blocks) == (1024, 512, n // 2, 1)


def test_every_elementwise_op_has_a_form_in_the_epilogue():
    b = Builder("epilogue", (Dim("m", 1, 300),))
    x, w = b.input("x", TensorType(bf16, (symbol("m"), 64))), b.input("w", TensorType(bf16, (64, 64)))
    made = b.emit("convert", b.emit("dot_general", x, w, attrs=DotAttrs((1,), (1,))), attrs=ConvertAttrs(f32))
    other, names = b.input("other", TensorType(f32, made.type.shape)), set()
    for name, row in OPS.items():
        if row.elementwise and name not in kernels.NOT_FLOAT:
            made = b.emit(name, *((made, other) if name in kernels.BINARY else (made,)))
            names.add(name)
    made = b.emit("select", b.input("mask", TensorType(bool_, made.type.shape)), made, other)
    made = b.emit("maximum", made, b.emit("constant", attrs=ConstantAttrs(float("-inf"), f32, made.type.shape)))
    program = kernels.program_of(b.finish({"y": made}))
    (source,) = render_program(program, "sm90", dim_order([program]), {}).values()
    assert source.language == "cuda" and len(names) > 30
    compile_sources([source], "sm90")


def test_ptx_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("AOTC_PTX", "1")
    program = kernels.program_of(linear_graph(bf16, 300, 64, 64, ""))
    (ptx,) = compile_sources(render_program(program, "sm90", dim_order([program]), {}).values(), "sm90").values()
    assert b".target sm_90a" in ptx.data and ptx.data[-1:] == b"\0" and ptx.registers > 0


def test_what_nvrtc_refuses_is_one_line():
    with pytest.raises(CompilerError, match=r"NVRTC refuses kernel broken for sm90: .*error") as caught:
        compile_cuda("broken", "int f() { return nothing; }", "sm90")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "rows", "n", "k", "arch", "language"),
    [
        (bf16, 300, 64, 64, "sm90", "cuda"), (f16, 65, 64, 64, "sm90", "cuda"), (f32, 300, 64, 64, "sm90", "triton"),
        (bf16, 300, 64, 60, "sm90", "triton"), (bf16, 300, 64, 64, "sm80", "triton"), (bf16, 300, 64, 64, "sm100", "triton"),
    ],
)  # fmt: skip
def test_which_layers_it_takes(dtype, rows, n, k, arch, language):
    program = kernels.program_of(linear_graph(dtype, rows, n, k, ""))
    assert [s.language for s in render_program(program, arch, dim_order([program]), {}).values()] == [language]


@pytest.mark.parametrize("rows", [128, 512])
def test_the_rule_fills_the_card(rows):
    """Llama shapes: whole waves of tiles, within the shared memory."""
    for n, depth, parts in ((14336, 4096, 2), (4096, 14336, 1), (6144, 4096, 1), (4096, 4096, 1), (2048, 8192, 1)):
        of = Linear(rows, n, depth, parts, bf16)
        tile = rule("sm90", of)
        blocks = tiles_of(of, tile.n)
        assert blocks / (-(-blocks // 132) * 132) > 0.9
        assert tile.shared_bytes <= 227 << 10 and cost(of, tile.n) == min(cost(of, t.n) for t in every("sm90", of))


@pytest.mark.parametrize("fields", [{"n": 24}, {"n": 272}, {"n": 0}, {"num_stages": 1}])
def test_tiles_that_the_template_does_not_take(fields):
    with pytest.raises(ValueError):
        Tile(**({"n": 64, "num_stages": 2} | fields))
