"""Renders a kernel of a program as C++: chooses the family's template and fills its hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from aotc.codegen.cpp import STORAGE, CppSyntax, lead_index
from aotc.codegen.loops import Index, LoopNest, add, linear, states_read, to_primitives
from aotc.errors import UnsupportedError
from aotc.ir.dtypes import f32
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.program import Kernel, Strides, area_of
from aotc.ir.sizes import Size, names_in, product

SYNTAX = CppSyntax()
MAX_PIECES = 8  # more parts of a concatenation than this are chosen an element
MAX_ROWS = 1024  # sequences of a step, for scratch
BLOCK = 512  # elements of a row that one work item covers, where rows can be cut


@dataclass(frozen=True)
class Source:
    """C++ of one kernel. `dims` are passed after the buffers; `scratch` is bytes a thread, a C++ expression."""

    text: str
    dims: tuple[str, ...]
    scratch: str = "0"


@cache
def environment() -> Environment:
    loader = PackageLoader("aotc.codegen.cpu", "templates")
    return Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


def render(kernel: Kernel, strides: Strides) -> Source:
    """The source of a kernel. `strides` are the bytes between slots of the state and blocks of the cache.

    Raises UnsupportedError where no template of the CPU computes it.
    """
    if kernel.family not in _FAMILIES:
        raise UnsupportedError(f"no CPU template for {kernel.family}: see docs/ARCHITECTURE.md, how to add a template")
    return _FAMILIES[kernel.family](_Frame(kernel, strides))


def kernel_dims(body: Graph) -> tuple[str, ...]:
    """The dims that a kernel takes after its buffers, in order."""
    return tuple(sorted({n for v in body.values() for s in v.type.shape for n in names_in(s)}))


class _Frame:
    """What every template needs: names of buffers and dims, and the declarations of arguments."""

    def __init__(self, kernel: Kernel, strides: Strides) -> None:
        self.kernel, self.strides = kernel, strides
        self.body = kernel.body
        updated = {self.body.output(name) for name, _ in self.body.aliases}
        self.arguments = [*self.body.inputs, *(v for v in self.body.outputs if v not in updated)]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.arguments)}
        for name, source in self.body.aliases:
            self.pointers[self.body.output(name)] = self.pointers[self.input(source)]
        self.dims = kernel_dims(self.body)

    def stride(self, linear: Value) -> int:
        """Bytes between two slots of the state, or two blocks of the cache."""
        return self.strides[area_of(linear.type)]

    def input(self, name: str) -> Value:
        return next(v for v in self.body.inputs if v.name == name)

    def signature(self) -> str:
        states = {source for _, source in self.body.aliases}
        lines = []
        for i, v in enumerate(self.arguments):
            constant = "" if v not in self.body.inputs or v.name in states else "const "
            kind = STORAGE[v.type.dtype.name]
            lines.append(f"  {constant}{kind}* __restrict const p{i} = ({constant}{kind}*)a[{i}].p;")
        lines += [f"  const int64_t {d} = a[{len(self.arguments) + i}].i;" for i, d in enumerate(self.dims)]
        return "\n".join(lines)

    def source(self, template: str, scratch: str = "0", **hooks: Any) -> Source:
        summary = ", ".join(n.op for n in self.body.nodes)
        summary = f"{summary[:90]}{'...' if len(summary) > 90 else ''} -> {self.body.outputs[0].type}"
        text = (
            environment()
            .get_template(f"{template}.cpp.j2")
            .render(name=self.kernel.name, summary=summary, signature=self.signature(), **hooks)
        )
        return Source(text, self.dims, scratch)


def _outer(shape: tuple[Size, ...]) -> tuple[list[tuple[str, str]], Index, str]:
    """Row variables with their sizes, innermost first; the row's index; the number of rows."""
    names = tuple(f"i{n}" for n in range(len(shape)))
    rows = [(v, SYNTAX.size(s)) for v, s in zip(names, shape, strict=True)][::-1]
    return rows, names, SYNTAX.size(product(shape))


@dataclass(frozen=True)
class _Nest:
    """A row's statements, and the vector loops over its columns: (low, high, statements) a piece."""

    row_lines: list[str]
    pieces: list[tuple[int, int, list[str]]]


def _rows_of(
    make: Callable[[], LoopNest], names: Index, column: str, width: Size, write: Callable[[LoopNest], None]
) -> _Nest:
    """Emits what `write` adds for a column, cutting the columns where a concatenation changes its part."""
    cuts = [0, width if isinstance(width, int) else 1 << 62]
    while True:
        nest, pieces = make(), []
        with nest.scope(*names) as row:
            for low, high in zip(cuts, cuts[1:], strict=False):
                nest.piece = (column, low, high)
                with nest.scope(column) as inner:
                    write(nest)
                pieces.append((low, high, inner.lines))
        wanted = sorted(set(cuts) | {c for c in nest.cuts if 0 < c < cuts[-1]})
        if wanted == cuts or len(wanted) > MAX_PIECES:
            return _Nest(nest.scopes[0].lines + row.lines, pieces)
        cuts = wanted


def _loops(frame: _Frame) -> Source:
    body = to_primitives(frame.body)
    (out,) = body.outputs
    (kept,) = frame.body.outputs
    pointers = dict(frame.pointers) | {out: frame.pointers[kept]}
    shape = out.type.shape or (1,)
    rows, names, outer = _outer(shape[:-1])
    index = (*names, "j") if out.type.shape else ()

    def write(nest: LoopNest) -> None:
        value = nest.emit(out, index)
        nest.line(SYNTAX.store(pointers[out], out.type.dtype, linear(index, nest.shape(out)), value))

    strides = {v: frame.stride(v) // v.type.dtype.itemsize for v in states_read(body)}
    nest = _rows_of(lambda: LoopNest(body, SYNTAX, pointers, strides), names, "j", shape[-1], write)
    shared = any("for (" in text for text in nest.row_lines)  # a reduction of the whole row: the row is not cut
    width = SYNTAX.size(shape[-1])
    return frame.source(
        "loops",
        inner=width,
        block=width if shared else BLOCK,
        outer=outer,
        rows=rows,
        row_lines=nest.row_lines,
        pieces=nest.pieces,
        whole=len(nest.pieces) == 1,
    )


def _matmul(frame: _Frame) -> Source:
    body = to_primitives(frame.body)
    dot = next(n for n in body.nodes if n.op == "dot_general")
    x, w = dot.inputs
    (out,) = body.outputs
    pointers = dict(frame.pointers) | {out: frame.pointers[frame.body.outputs[0]]}
    columns, depth = w.type.shape
    pair = out.type.shape != dot.out.type.shape
    assert isinstance(columns, int) and isinstance(depth, int)
    width = columns // 2 if pair else columns
    nest = LoopNest(body, SYNTAX, pointers)
    column = "c"

    def accumulated(index: Index) -> str:
        if index[-1] == column:
            return "acc[j]"
        assert pair and index[-1] == add(str(width), column), index
        return "acc_high[j]"

    nest.given[dot.out] = accumulated
    lead = x.type.shape[:-1]
    names = tuple(f"i{n}" for n in range(len(lead)))
    with nest.scope(*names) as row, nest.scope(column) as inner:
        index = (*names, column)
        value = nest.emit(out, index)
        nest.line(SYNTAX.store(pointers[out], out.type.dtype, linear(index, nest.shape(out)), value))
    return frame.source(
        "matmul", M=SYNTAX.size(product(lead)), N=width,
        K=depth, pair=pair, x=frame.pointers[x], w=frame.pointers[w], rows=lead_index("m", lead, names, SYNTAX), column=column,
        row_lines=nest.scopes[0].lines + row.lines, lines=inner.lines,
    )  # fmt: skip


def _kv_append(frame: _Frame) -> Source:
    body = to_primitives(frame.body)
    node = _only(body, "kv_append")
    kv, k, v, positions, rows, index = node.inputs
    tokens, heads, d = k.type.shape
    storage = kv.type.dtype

    def write(nest: LoopNest) -> None:
        for value, target in ((k, "keys"), (v, "values")):
            nest.line(SYNTAX.store(target, storage, "c", nest.emit(value, ("t", "h", "c"))))

    nest = _rows_of(lambda: LoopNest(body, SYNTAX, frame.pointers), ("t", "h"), "c", d, write)
    return frame.source(
        "kv_append", tokens=SYNTAX.size(tokens), heads=heads, d=d, block_tokens=kv.type.shape[3],
        storage=STORAGE[storage.name], kv=frame.pointers[kv], positions=frame.pointers[positions],
        rows=frame.pointers[rows], index=frame.pointers[index], blocks=_blocks_a_row(index),
        block_bytes=frame.stride(kv),
        row_lines=nest.row_lines, pieces=nest.pieces,
    )  # fmt: skip


def _attention(frame: _Frame) -> Source:
    node = _only(frame.body, "attention")
    q, kv, query_start, seq_lens, index = (frame.pointers[v] for v in node.inputs)
    shape, cache = node.inputs[0].type.shape, node.inputs[1].type
    storage = STORAGE[cache.dtype.name]
    return frame.source(
        "attention", f"attention_batch_scratch_bytes<{shape[2]}, {storage}>({MAX_ROWS})", heads=shape[1],
        kv_heads=cache.shape[2], d=shape[2], block_tokens=cache.shape[3], window=node.attrs.window or 0,
        scale=SYNTAX.constant(node.attrs.scale, f32), storage=storage, q=q, kv=kv, query_start=query_start,
        seq_lens=seq_lens, index=index, rows=SYNTAX.size(node.inputs[3].type.shape[0]), out=frame.pointers[node.out],
        blocks=_blocks_a_row(node.inputs[4]), block_bytes=frame.stride(node.inputs[1]),
    )  # fmt: skip


def _self_attention(frame: _Frame) -> Source:
    node = _only(frame.body, "self_attention")
    qkv, lengths = node.inputs
    batch, length, _, heads, d = qkv.type.shape
    storage = STORAGE[qkv.type.dtype.name]
    return frame.source(
        "self_attention", f"attention_encoder_scratch_bytes<{d}, {storage}>({MAX_ROWS})", storage=storage, heads=heads,
        d=d, batch=SYNTAX.size(batch), length=SYNTAX.size(length), scale=SYNTAX.constant(node.attrs.scale, f32),
        qkv=frame.pointers[qkv], lengths=frame.pointers[lengths], out=frame.pointers[node.out],
    )  # fmt: skip


def _sample(frame: _Frame) -> Source:
    node = _only(frame.body, "sample")
    logits, settings, history, index = (frame.pointers[v] for v in node.inputs)
    token, logprobs, ids, _ = (frame.pointers[v] for v in node.outputs)
    rows, vocab = node.inputs[0].type.shape
    return frame.source(
        "sample", f"sample_scratch_bytes({vocab})", rows=SYNTAX.size(rows), vocab=vocab, settings=settings,
        history=history, context=node.inputs[2].type.shape[1], index=index, logits=logits, token=token,
        logprobs=logprobs, ids=ids, slot_bytes=frame.stride(node.inputs[2]),
    )  # fmt: skip


def _only(body: Graph, op: str) -> Node:
    return next(n for n in body.nodes if n.op == op)


def _blocks_a_row(index: Value) -> int:
    """Entries of a row of a cache's index: one slot, or the pages of a block table."""
    return index.type.shape[1] if index.type.rank == 2 else 1  # type: ignore[return-value]


_FAMILIES: dict[str, Callable[[_Frame], Source]] = {
    "loops": _loops, "matmul": _matmul, "kv_append": _kv_append, "attention": _attention, "sample": _sample,
    "self_attention": _self_attention,
}  # fmt: skip
