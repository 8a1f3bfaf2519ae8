"""What kernels in CUDA C++ for Hopper share: the header that they begin with, how loop nests are written in them, the
finished source."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

from aotc.codegen.cpp import STORAGE, CppSyntax
from aotc.codegen.cuda.frame import Frame, Grid, Source, TensorMap, environment
from aotc.codegen.cuda.syntax import POINTER, dim
from aotc.ir.sizes import Size


class _Syntax(CppSyntax):
    """With dims named as in kernels in Triton: apart from whatever a template names."""

    def dim(self, name: str) -> str:
        return dim(name)


SYNTAX = _Syntax()
HEAD_END = "// end of the header\n"


@cache
def header(name: str = "hopper.cuh") -> str:
    """What the source of a kernel begins with; `hopper_host.h` has the same for a CPU."""
    return (resources.files("aotc.codegen.cuda") / "lib" / name).read_text()


def source(
    frame: Frame, template: str, grid: Grid, num_warps: int, num_stages: int, shared_bytes: int,
    maps: tuple[TensorMap, ...], scratch_bytes: Size = 0, counter_bytes: Size = 0, more_head: str = "",
    together: bool = False, cluster: int = 1, **hooks: Any,
) -> Source:  # fmt: skip
    """The source that a template and its hooks make, as `Frame.source` does for Triton: pointers, dims, counters and scratch
    where they are not 0, two that are null, then tensor maps. `more_head` belongs to the header; `cluster` blocks that
    follow one another along the grid's first axis run at the same time and see each other's shared memory."""
    extra = [("int", "counters", "*i32", counter_bytes), ("float", "scratch", "*fp32", scratch_bytes)]
    extra = [("int", "dims", "*i32", 1), *(e for e in extra if e[3] != 0)]
    arguments = [f"{STORAGE[v.type.dtype.name]}* p{i}" for i, v in enumerate(frame.arguments)]
    words = set(re.findall(r"\w+", " ".join(map(str, hooks.values()))))
    kernel = f"KERNEL IN_CLUSTERS({cluster})" if cluster > 1 else "KERNEL"
    text = environment().get_template(f"{template}.cu.j2").render(
        hooks, kernel=kernel, name="__kernel__", summary=frame.summary(), head=f"{header()}{more_head}{HEAD_END}",
        arguments=", ".join([*arguments, *(f"{kind}* {name}" for kind, name, _, _ in extra), "void*, void*"]),
        dims=[(dim(n), at) for at, n in enumerate(frame.setting.dims) if dim(n) in words],
    )  # fmt: skip
    types = (*(POINTER[v.type.dtype.name] for v in frame.arguments), *(e[2] for e in extra))
    symbol = f"{frame.kernel.family}_{hashlib.sha256(f'{text}{types}'.encode()).hexdigest()[:12]}"
    return Source(
        symbol, text.replace("__kernel__", symbol), types, grid, num_warps, num_stages, scratch_bytes, counter_bytes,
        language="cuda", shared_bytes=shared_bytes, together=together, cluster=cluster, maps=maps,
    )  # fmt: skip
