"""Renders a kernel of a program as Triton: chooses the family's template and fills its hooks.

Arguments are the body's inputs, its fresh outputs, then `dims`: i32 values of the dims, read on the device, so that
a step may have fewer rows than its program was made for; surplus programs of the grid leave early. A kernel that
needs memory of its own takes a pointer `scratch` after that.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from aotc.codegen.cuda import schedule
from aotc.codegen.cuda.nest import BLOCK_LIMIT, BlockNest, power_of_two
from aotc.codegen.cuda.syntax import POINTER, STORAGE, TritonSyntax, dim
from aotc.codegen.loops import Index, add, to_primitives
from aotc.errors import UnsupportedError
from aotc.ir.dtypes import f32
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops.sample_reference import GREEDY_BELOW, MAX_LOGPROBS, ROW
from aotc.ir.program import Kernel
from aotc.ir.sizes import Dim, Size, ceildiv, product, upper_bound

SYNTAX = TritonSyntax()
Grid = tuple[Size, Size, Size]


@dataclass(frozen=True)
class Setting:
    """What kernels of one program are rendered for.

    `bounds` are the program's dims, `dims` the order in which the device holds their values (see
    `aotc.codegen.cuda.launch`), `slot_bytes` the stride between sequences in the state.
    """

    arch: str
    bounds: tuple[Dim, ...]
    dims: tuple[str, ...]
    slot_bytes: int = 0


@dataclass(frozen=True)
class Source:
    """Triton of one kernel; `symbol` names it by its content. `signature` has the types of its arguments."""

    symbol: str
    text: str
    signature: tuple[str, ...]
    grid: Grid
    num_warps: int
    num_stages: int
    scratch_bytes: Size = 0


def is_linear_for_tensor_cores(node: Node) -> bool:
    """Whether `matmul` computes a node: x [..., K] times a dense weight [N, K] in a float of up to 32 bits."""
    if node.op != "dot_general":
        return False
    at, (x, w) = node.attrs, node.inputs
    dense = w.type.rank == 2 and w.type.packing is None and all(isinstance(s, int) for s in w.type.shape)
    over_k = at.lhs_contracting == (x.type.rank - 1,) and at.rhs_contracting == (1,) and not at.lhs_batch
    return dense and over_k and x.type.rank > 1 and x.type.dtype.name in ("f32", "f16", "bf16")


def render(kernel: Kernel, setting: Setting) -> Source:
    """The source of a kernel. Raises UnsupportedError where no template of CUDA computes it."""
    if kernel.family not in _FAMILIES:
        raise UnsupportedError(f"no CUDA template for {kernel.family}: see docs/ARCHITECTURE.md, how to add a template")
    return _FAMILIES[kernel.family](_Frame(kernel, setting))


@cache
def environment() -> Environment:
    loader = PackageLoader("aotc.codegen.cuda", "templates")
    return Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


class _Frame:
    """What every template needs: names of buffers and dims, bounds of sizes."""

    def __init__(self, kernel: Kernel, setting: Setting) -> None:
        self.kernel, self.setting, self.body = kernel, setting, kernel.body
        updated = {self.body.output(name) for name, _ in self.body.aliases}
        self.arguments = [*self.body.inputs, *(v for v in self.body.outputs if v not in updated)]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.arguments)}
        states = {source: next(v for v in self.body.inputs if v.name == source) for _, source in self.body.aliases}
        for name, source in self.body.aliases:
            self.pointers[self.body.output(name)] = self.pointers[states[source]]

    def upper(self, size: Size) -> int:
        return upper_bound(size, self.setting.bounds)

    def nest(self, body: Graph, wide: bool) -> BlockNest:
        """A loop nest over a body whose outputs are those of the kernel."""
        made = dict(zip(body.outputs, (self.pointers[v] for v in self.body.outputs), strict=True))
        sizes = {s for v in body.values() for s in v.type.shape}
        syntax = TritonSyntax(double=any(v.type.dtype.name == "f64" for v in self.body.values()))
        return BlockNest(body, syntax, self.pointers | made, {SYNTAX.size(s): self.upper(s) for s in sizes}, wide)

    def wide(self, *values: Value) -> bool:
        """Whether a place in one of these tensors needs 64 bits."""
        return any(self.upper(v.type.size) >= 2**31 for v in values)

    def source(
        self, template: str, grid: Grid, num_warps: int, num_stages: int = 1, scratch_bytes: Size = 0, wide: bool = False,
        **hooks: Any,
    ) -> Source:  # fmt: skip
        lines = "\n".join(hooks.get("lines", ()))
        if "places" in hooks:
            hooks["places"] = [(name, place) for name, place in hooks["places"] if name in _words(lines)]
        words = _words(lines + " ".join(map(str, hooks.values())))
        dims = [(dim(n), place) for place, n in enumerate(self.setting.dims) if dim(n) in words]
        extra = ["dims", *(["scratch"] if scratch_bytes != 0 else [])]
        types = [
            *(POINTER[v.type.dtype.name] for v in self.arguments),
            "*i32",
            *(["*fp32"] if scratch_bytes != 0 else []),
        ]
        summary = ", ".join(n.op for n in self.body.nodes)
        text = environment().get_template(f"{template}.py.j2").render(
            name="__kernel__", summary=f"{summary[:90]} -> {self.body.outputs[0].type}", dims=dims, wide=wide,
            arguments=", ".join([f"p{i}" for i in range(len(self.arguments))] + extra),
            code=lines, **hooks,
        )  # fmt: skip
        digest = hashlib.sha256(f"{text}\0{types}\0{num_warps}\0{num_stages}".encode()).hexdigest()[:12]
        symbol = f"{self.kernel.family}_{digest}"
        text = text.replace("__kernel__", symbol)
        return Source(symbol, text, tuple(types), grid, num_warps, num_stages, scratch_bytes)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _loops(frame: _Frame) -> Source:
    body = to_primitives(frame.body)
    folds = [n for n in body.nodes if n.op in ("reduce", "arg_reduce", "dot_general", "convolution", "reduce_window")]
    if folds and all(_is_trailing(n) for n in folds):
        return _rows(frame, body)
    (out,) = body.outputs
    wide, shape = frame.wide(*body.values()), out.type.shape
    nest, names = frame.nest(body, wide), tuple(f"i{n}" for n in range(len(shape)))
    nest.vector("x", schedule.POINTWISE_BLOCK, "live")
    for name in names:
        nest.vectors[name] = nest.axes("x")
    nest.scopes[0].variables |= {"x", *names}
    nest.flat = (names, nest.shape(out), "x")
    nest.store(out, names)
    blocks = ceildiv(out.type.size, schedule.POINTWISE_BLOCK)
    return frame.source(
        "pointwise", (blocks, 1, 1), 4, wide=wide, block=schedule.POINTWISE_BLOCK, size=SYNTAX.size(out.type.size),
        places=_index("x", names, shape), lines=nest.scopes[0].lines,
    )  # fmt: skip


def _is_trailing(node: Node) -> bool:
    """Whether a reduction runs over the last axes."""
    rank = node.inputs[0].type.rank
    if node.op == "reduce":
        return sorted(node.attrs.axes) == list(range(rank - len(node.attrs.axes), rank))
    return node.op == "arg_reduce" and node.attrs.axis == rank - 1


def _rows(frame: _Frame, body: Graph) -> Source:
    """A program for each place that the reductions have: a row of the output, or one element of it."""
    (out,) = body.outputs
    wide, shape = frame.wide(*body.values()), out.type.shape
    split = max(len(shape) - 1, 0)
    nest = _row_nest(frame, body, split, wide)
    if nest.sequential and split < len(shape):
        split = len(shape)
        nest = _row_nest(frame, body, split, wide)
    names = tuple(f"i{n}" for n in range(split))
    rows = product(shape[:split])
    width = max(nest.lanes.values(), default=1)
    return frame.source(
        "rows", (rows, 1, 1), schedule.row_warps(width), wide=wide, size=SYNTAX.size(rows),
        places=_index("row", names, shape[:split]), lines=nest.scopes[0].lines,
    )  # fmt: skip


def _row_nest(frame: _Frame, body: Graph, split: int, wide: bool) -> BlockNest:
    (out,) = body.outputs
    nest, names = frame.nest(body, wide), tuple(f"i{n}" for n in range(split))
    nest.scopes[0].variables |= set(names)
    if split == len(out.type.shape):
        nest.store(out, names)
        return nest
    width = nest.shape(out)[-1]
    if nest.bound(width) <= BLOCK_LIMIT:
        nest.store(out, (*names, nest.block(width)))
    else:
        nest.walk(width, lambda c: nest.store(out, (*names, c)))
    return nest


def _index(flat: str, names: Index, shape: tuple[Size, ...]) -> list[tuple[str, str]]:
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


def _matmul(frame: _Frame) -> Source:
    body = to_primitives(frame.body)
    dot = _only(body, "dot_general")
    x, w = dot.inputs
    (out,) = body.outputs
    columns, depth = w.type.ints
    parts = 2 if out.type.shape != dot.out.type.shape else 1  # a gated layer: both halves of a column at once
    width, rows = columns // parts, product(x.type.shape[:-1])
    wide = frame.wide(x, w, dot.out)
    hooks = {
        "n": width, "depth": depth, "parts": range(parts), "x": frame.pointers[x], "w": frame.pointers[w],
        "m": SYNTAX.size(rows), "wide": wide,
    }  # fmt: skip
    if frame.upper(rows) <= schedule.MATVEC_ROWS:
        tile = schedule.matvec(frame.upper(rows), width, depth, parts)
        lines = _matvec_lines(frame, body, dot, width, tile, hooks["m"])
        grid: Grid = (ceildiv(width, tile.n), 1, 1)
        return frame.source("matvec", grid, tile.num_warps, tile.num_stages, tile=tile, lines=lines, **hooks)
    tile = schedule.matmul(frame.upper(rows), width, depth, x.type.dtype, parts, frame.setting.arch)
    nest = frame.nest(body, wide)
    nest.vector("m", tile.m, "live_m")
    nest.vector("c", tile.n, "live_c")
    nest.scopes[0].variables |= {"m", "c"}
    nest.given[dot.out] = lambda index: f"acc{_part(index, width)}"
    nest.vectors |= {f"acc{p}": nest.axes("m", "c") for p in range(parts)}
    nest.store(out, (*_lead(nest, "m", x.type.shape[:-1]), "c"))
    grid = (ceildiv(width, tile.n), ceildiv(rows, tile.m), 1)
    return frame.source("matmul", grid, tile.num_warps, tile.num_stages, tile=tile, lines=nest.scopes[0].lines, **hooks)


def _matvec_lines(frame: _Frame, body: Graph, dot: Node, width: int, tile: schedule.Tile, rows: str) -> list[str]:
    """The epilogue of each row. All but the first may be surplus: loads and stores of those are guarded."""
    (out,) = body.outputs
    nest = frame.nest(body, frame.wide(*dot.inputs, dot.out))
    nest.vector("c", tile.n, "live")
    nest.scopes[0].variables |= {"c"}
    for row in range(tile.m):
        nest.given[dot.out] = lambda index, row=row: f"acc{_part(index, width)}_{row}"
        nest.vectors |= {f"acc{p}_{row}": nest.axes("c") for p in range(2)}
        nest.guard = f"({row} < {rows})" if row else ""
        nest.store(out, (*_lead(nest, str(row), dot.inputs[0].type.shape[:-1]), "c"))
    return nest.scopes[0].lines


def _part(index: Index, width: int) -> int:
    """Which half of a gated layer's output a column lies in."""
    if index[-1] == "c":
        return 0
    assert index[-1] == add(str(width), "c"), index
    return 1


def _lead(nest: BlockNest, flat: str, shape: tuple[Size, ...]) -> Index:
    """The leading index of a flat row."""
    if len(shape) == 1:
        return (flat,)
    names = tuple(f"i{n}" for n in range(len(shape)))
    places = {name: nest.named(expression) for name, expression in _index(flat, names, shape)}
    return tuple(places[n] for n in names)


def _kv_append(frame: _Frame) -> Source:
    body = to_primitives(frame.body)
    node = _only(body, "kv_append")
    _static(node)
    kv, k, v, positions, rows, index = node.inputs
    nest = frame.nest(body, wide=False)
    tokens, heads, d = k.type.shape
    context = kv.type.shape[3]
    nest.scopes[0].variables |= {"t", "h", "place"}
    c = nest.block(SYNTAX.size(d))
    for value, start in ((k, "place"), (v, f"place + {heads * context * d}")):
        name = nest.emit(value, ("t", "h", c))
        nest.line(nest.syntax.store(frame.pointers[kv], kv.type.dtype, f"({start} + {c})", name, nest.mask(c)))
    return frame.source(
        "kv_append", (tokens, heads, 1), 1, tokens=SYNTAX.size(tokens), d=d, context=context,
        slot_stride=_slot_stride(frame, kv), positions=frame.pointers[positions], rows=frame.pointers[rows],
        index=frame.pointers[index], lines=nest.scopes[0].lines,
    )  # fmt: skip


def _attention(frame: _Frame) -> Source:
    node = _only(frame.body, "attention")
    _static(node)
    q, kv, query_start, seq_lens, index = (frame.pointers[v] for v in node.inputs)
    cache = node.inputs[1].type
    tokens = node.inputs[0].type.shape[0]
    heads, d = (frame.upper(s) for s in node.inputs[0].type.shape[1:])
    kv_heads, context = (frame.upper(s) for s in cache.shape[2:4])
    rows = node.inputs[3].type.shape[0]
    group = heads // kv_heads
    queries, tile = schedule.attention(group, d, cache.dtype, decode=tokens == rows)
    tiles = (tokens + rows * (queries - 1)) // queries
    return frame.source(
        "attention", (tiles, kv_heads, 1), tile.num_warps, tile.num_stages, q=q, kv=kv, query_start=query_start,
        seq_lens=seq_lens, index=index,
        out=frame.pointers[node.out], rows=SYNTAX.size(rows), max_rows=power_of_two(frame.upper(rows)), heads=heads,
        kv_heads=kv_heads, group=group, context=context, d=d, queries=queries, tile=tile,
        window=node.attrs.window or 0, scale=SYNTAX.literal(node.attrs.scale * math.log2(math.e), f32),
        storage=STORAGE[cache.dtype.name], slot_stride=_slot_stride(frame, node.inputs[1]),
    )  # fmt: skip


def _sample(frame: _Frame) -> Source:
    node = _only(frame.body, "sample")
    logits, settings, history, index = (frame.pointers[v] for v in node.inputs)
    token, logprobs, ids, _ = (frame.pointers[v] for v in node.outputs)
    rows, vocab = node.inputs[0].type.shape[0], frame.upper(node.inputs[0].type.shape[1])
    at = {name: entry[1] // entry[0].base.itemsize for name, entry in (ROW.fields or {}).items()}
    at["counter_low"] = 2 * at["counter_base"]  # in words of 32 bits
    return frame.source(
        "sample", (rows, 1, 1), schedule.SAMPLE_WARPS, scratch_bytes=rows * (8 * vocab), rows=SYNTAX.size(rows),
        vocab=vocab, chunk=min(schedule.SAMPLE_CHUNK, power_of_two(vocab)), at=at, logits=logits, settings=settings,
        history=history, index=index, context=node.inputs[2].type.shape[1], out_token=token, out_logprobs=logprobs,
        out_ids=ids, logprobs=MAX_LOGPROBS + 1, slot_stride=_slot_stride(frame, node.inputs[2]),
        greedy_below=float(GREEDY_BELOW),
    )  # fmt: skip


def _slot_stride(frame: _Frame, state: Value) -> int:
    """The distance of two sequences in the state, in elements."""
    return frame.setting.slot_bytes // state.type.dtype.itemsize


def _only(body: Graph, op: str) -> Node:
    return next(n for n in body.nodes if n.op == op)


def _static(node: Node) -> None:
    if node.attrs.layout != "static":
        raise UnsupportedError("paged KV caches have no CUDA template: compile with --kv-layout static")


_FAMILIES: dict[str, Callable[[_Frame], Source]] = {
    "loops": _loops, "matmul": _matmul, "kv_append": _kv_append, "attention": _attention, "sample": _sample,
}  # fmt: skip
