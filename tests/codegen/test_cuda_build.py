"""Kernels as the driver takes them: cubins, or PTX that it translates itself."""

import pytest

from aotc.codegen.cuda.build import compile_sources
from aotc.codegen.cuda.launch import dim_order, render_program
from aotc.codegen.cuda.render import TEMPLATES
from aotc.compiler import make_program
from aotc.ir.builder import Builder
from aotc.ir.dtypes import f32
from aotc.ir.graph import TensorType
from aotc.ir.sizes import Dim, symbol


@pytest.fixture
def sources():
    b = Builder("double", (Dim("n", 1, 4096),))
    x = b.input("x", TensorType(f32, (symbol("n"),)))
    program = make_program(b.finish({"y": b.emit("add", x, x)}), TEMPLATES)
    return {arch: render_program(program, arch, dim_order([program]), {}).values() for arch in ("sm80", "sm89")}


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_ptx_takes_the_place_of_a_cubin_where_it_is_asked_for(sources, arch, monkeypatch):
    (cubin,) = compile_sources(sources[arch], arch).values()
    assert cubin.data[:4] == b"\x7fELF"
    monkeypatch.setenv("AOTC_PTX", "1")
    (ptx,) = compile_sources(sources[arch], arch).values()
    assert f".target sm_{arch[2:]}".encode() in ptx.data and ptx.data[-1:] == b"\0"
    assert (ptx.registers, ptx.shared) == (cubin.registers, cubin.shared)
    monkeypatch.setenv("AOTC_PTX", "0")
    assert list(compile_sources(sources[arch], arch).values()) == [cubin], "the cache knows which is which"
