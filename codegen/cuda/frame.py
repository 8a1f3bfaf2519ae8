"""What the templates of all kernels share: names of buffers and dims, bounds of sizes, the finished source.

Arguments are the body's inputs, its fresh outputs, then `dims`: i32 values of the dims, read on the device, so that
a step may have fewer rows than its program was made for; surplus programs of the grid leave early. A kernel that
counts arrivals takes a pointer `counters` after that (zero before and after), one that needs memory of its own takes
a pointer `scratch`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from aotc.codegen.cuda.nest import BlockNest
from aotc.codegen.cuda.syntax import POINTER, TritonSyntax, dim
from aotc.codegen.cuda.tables import Schedules
from aotc.codegen.loops import Index, states_read
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.program import Kernel, Strides, area_of
from aotc.ir.sizes import Dim, Size, upper_bound

SYNTAX = TritonSyntax()
Grid = tuple[Size, Size, Size]


@dataclass(frozen=True)
class Setting:
    """What kernels of one program are rendered for.

    `bounds` are the program's dims, `dims` the order in which the device holds their values (see
    `aotc.codegen.cuda.launch`), `strides` the bytes between slots of the state and blocks of the cache, `schedules`
    what chooses tiles (None: the tables that come with aotc). `widest` are the dims of the largest program of the same
    kind, where schedules must be those of that one: then what a kernel computes of a row depends on no bucket.
    """

    arch: str
    bounds: tuple[Dim, ...]
    dims: tuple[str, ...]
    strides: Strides = field(default_factory=dict)
    schedules: Schedules | None = field(default=None, compare=False)
    widest: tuple[Dim, ...] = ()


@dataclass(frozen=True)
class TensorMap:
    """What the hardware must know of a matrix [rows, columns] of 16-bit elements, argument number `argument`, to copy
    boxes of it (TMA). A box is `box_rows` of `box_blocks` blocks of 64 columns, one block behind the other, each swizzled
    by 128 bytes; rows outside of the matrix are 0 there."""

    argument: int
    dtype: str
    rows: int
    columns: int
    box_rows: int
    box_blocks: int


@dataclass(frozen=True)
class Source:
    """Triton or CUDA C++ of one kernel; `symbol` names it by its content. `signature` has the types of its arguments.
    Tensor maps are passed by value, behind all of them."""

    symbol: str
    text: str
    signature: tuple[str, ...]
    grid: Grid
    num_warps: int
    num_stages: int
    scratch_bytes: Size = 0
    counter_bytes: Size = 0
    language: str = "triton"
    shared_bytes: int = 0  # of a kernel in CUDA C++: Triton says itself what it takes
    together: bool = False  # blocks wait for one another: no more of them may be launched than run at once
    cluster: int = 1  # blocks that the hardware launches together
    maps: tuple[TensorMap, ...] = ()


@cache
def environment() -> Environment:
    loader = PackageLoader("aotc.codegen.cuda", "templates")
    return Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


class Frame:
    """What every template needs: names of buffers and dims, bounds of sizes."""

    def __init__(self, kernel: Kernel, setting: Setting) -> None:
        self.kernel, self.setting, self.body = kernel, setting, kernel.body
        updated = {self.body.output(name) for name, _ in self.body.aliases}
        self.arguments = [*self.body.inputs, *(v for v in self.body.outputs if v not in updated)]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.arguments)}
        states = {source: next(v for v in self.body.inputs if v.name == source) for _, source in self.body.aliases}
        for name, source in self.body.aliases:
            self.pointers[self.body.output(name)] = self.pointers[states[source]]

    def place(self, value: Value) -> int:
        """Which argument a value is."""
        return self.arguments.index(value)

    def upper(self, size: Size) -> int:
        return upper_bound(size, self.setting.bounds)

    def widest(self) -> Frame:
        """The frame whose bounds schedules are chosen for; the grid stays that of the program."""
        setting = self.setting
        return Frame(self.kernel, replace(setting, bounds=setting.widest)) if setting.widest else self

    def nest(self, body: Graph, wide: bool) -> BlockNest:
        """A loop nest over a body whose outputs are the first of the kernel's."""
        made = dict(zip(body.outputs, (self.pointers[v] for v in self.body.outputs), strict=False))
        sizes = {s for v in body.values() for s in v.type.shape}
        syntax = TritonSyntax(double=any(v.type.dtype.name == "f64" for v in self.body.values()))
        strides = {v: slot_stride(self, v) for v in states_read(body)}
        return BlockNest(body, syntax, self.pointers | made, {SYNTAX.size(s): self.upper(s) for s in sizes}, wide, strides)

    def wide(self, *values: Value) -> bool:
        """Whether a place in one of these tensors needs 64 bits."""
        return any(self.upper(v.type.size) >= 2**31 for v in values)

    def summary(self) -> str:
        """What the kernel computes, for the head of its source."""
        return f"{', '.join(n.op for n in self.body.nodes)[:90]} -> {self.body.outputs[0].type}"

    def source(
        self, template: str, grid: Grid, num_warps: int, num_stages: int = 1, scratch_bytes: Size = 0,
        counter_bytes: Size = 0, wide: bool = False, **hooks: Any,
    ) -> Source:  # fmt: skip
        lines = "\n".join(hooks.get("lines", ()))
        if "places" in hooks:
            hooks["places"] = [(name, place) for name, place in hooks["places"] if name in _words(lines)]
        words = _words(lines + " ".join(map(str, hooks.values())))
        dims = [(dim(n), place) for place, n in enumerate(self.setting.dims) if dim(n) in words]
        own = [("dims", "*i32", 1), ("counters", "*i32", counter_bytes), ("scratch", "*fp32", scratch_bytes)]
        extra = [(name, type_) for name, type_, size in own if size != 0]
        types = [*(POINTER[v.type.dtype.name] for v in self.arguments), *(t for _, t in extra)]
        text = environment().get_template(f"{template}.py.j2").render(
            name="__kernel__", summary=self.summary(), dims=dims, wide=wide,
            arguments=", ".join([f"p{i}" for i in range(len(self.arguments))] + [n for n, _ in extra]),
            code=lines, waits=waits(self.setting.arch), **hooks,
        )  # fmt: skip
        digest = hashlib.sha256(f"{text}\0{types}\0{num_warps}\0{num_stages}".encode()).hexdigest()[:12]
        symbol = f"{self.kernel.family}_{digest}"
        text = text.replace("__kernel__", symbol)
        return Source(symbol, text, tuple(types), grid, num_warps, num_stages, scratch_bytes, counter_bytes)


def waits(arch: str) -> bool:
    """Whether kernels for `arch` start before the one before them has ended, and wait for it themselves."""
    return int(arch[2:]) >= 90


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def index_of(flat: str, names: Index, shape: tuple[Size, ...]) -> list[tuple[str, str]]:
    """Statements that take a flat place apart."""
    found: list[tuple[str, str]] = []
    inner: Size = 1
    for n in reversed(range(len(names))):
        place = flat if inner == 1 else f"{flat} // {SYNTAX.size(inner)}"
        if n:
            place = f"{place if inner == 1 else f'({place})'} % {SYNTAX.size(shape[n])}"
        found.append((names[n], place))
        inner = inner * shape[n]
    return found


def lead(nest: BlockNest, flat: str, shape: tuple[Size, ...]) -> Index:
    """The leading index of a flat row."""
    if len(shape) == 1:
        return (flat,)
    names = tuple(f"i{n}" for n in range(len(shape)))
    places = {name: nest.named(expression) for name, expression in index_of(flat, names, shape)}
    return tuple(places[n] for n in names)


def slot_stride(frame: Frame, state: Value) -> int:
    """The distance of two slots of the state, or of two blocks of the cache, in elements."""
    return frame.setting.strides[area_of(state.type)] // state.type.dtype.itemsize


def only(body: Graph, op: str) -> Node:
    return next(n for n in body.nodes if n.op == op)
