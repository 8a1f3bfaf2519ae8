"""The CPU target's kernels of a set of programs: sources, library, and what the plan must know of each."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aotc.codegen.cpu.build import build_library
from aotc.codegen.cpu.render import Source, render
from aotc.ir.program import Kernel, Program, Strides

INCLUDES = {
    "loops": (), "matmul": ("gemv.h", "gemm.h"), "kv_append": (), "attention": ("attention_batch.h",),
    "self_attention": ("attention_encoder.h",),
    "sample": ("sampler.h",),
}  # fmt: skip
"""Headers that a family needs besides those of every kernel."""

_PROLOGUE = '#include "abi.h"\n#include "scalar.h"\n'


@dataclass(frozen=True)
class Library:
    """A built library: its bytes, the dims that each kernel takes after its buffers, scratch bytes a thread."""

    data: bytes
    sources: dict[str, str]
    dims: dict[str, tuple[str, ...]]
    scratch_bytes: int


def render_all(programs: Iterable[Program], strides: Strides) -> dict[str, tuple[Kernel, Source]]:
    """The sources of all kernels, each once."""
    kernels = {k.name: k for p in programs for k in p.kernels.values()}
    return {name: (k, render(k, strides)) for name, k in sorted(kernels.items())}


def build(
    programs: Iterable[Program], level: str, strides: Strides, progress: Callable[[str], None] = lambda _: None
) -> Library:
    """Renders, compiles and links the kernels of `programs` for one CPU level."""
    rendered = render_all(programs, strides)
    units = {name: _unit(kernel, source) for name, (kernel, source) in rendered.items()}
    units["aotc_runtime"] = '#include "runtime.h"\n'
    data = build_library(units, level, progress)
    dims = {name: source.dims for name, (_, source) in rendered.items()}
    return Library(data, units, dims, _scratch(data, rendered))


def _unit(kernel: Kernel, source: Source) -> str:
    headers = "".join(f'#include "{h}"\n' for h in INCLUDES[kernel.family])
    size = f'extern "C" const int64_t {kernel.name}_scratch = {source.scratch};\n'
    return f"{_PROLOGUE}{headers}using namespace aotc;\n\n{source.text}\n{size}"


def _scratch(data: bytes, names: Iterable[str]) -> int:
    """The most scratch that a kernel asks for. The sizes are constants of the library: nothing of it is run."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        library = ctypes.CDLL(file.name)
        largest = max((ctypes.c_int64.in_dll(library, f"{n}_scratch").value for n in names), default=0)
    return -(-largest // 64) * 64
