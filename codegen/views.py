"""Views, gathers and other ops that only place elements, as index arithmetic of a loop nest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aotc.ir.graph import Node, TensorType
from aotc.ir.sizes import Size

if TYPE_CHECKING:
    from aotc.codegen.loops import LoopNest

Index = tuple[str, ...]
"""One expression an axis."""


def add(*parts: str) -> str:
    kept = [p for p in parts if p != "0"]
    if not kept:
        return "0"
    return kept[0] if len(kept) == 1 else "(" + " + ".join(kept) + ")"


def mul(a: str, b: str) -> str:
    if "0" in (a, b):
        return "0"
    return b if a == "1" else a if b == "1" else f"{a} * {b}"


def linear(index: Index, shape: tuple[str, ...]) -> str:
    """Row-major offset of an index, in elements."""
    offset = "0"
    for place, size in zip(index, shape, strict=True):
        offset = add(mul(offset, size), place)
    return offset


def _reshape(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    return nest.emit(x, reindex(nest, node.out.type, x.type, index))


def reindex(nest: LoopNest, outer: TensorType, inner: TensorType, index: Index) -> Index:
    """The index into a reshape's input, axis groups of equal size at a time: a leading axis stays itself."""
    result: list[str] = []
    i = j = 0
    while i < len(outer.shape) or j < len(inner.shape):
        group_out, group_in = [i], [j]
        size_out: Size = outer.shape[i] if i < len(outer.shape) else 1
        size_in: Size = inner.shape[j] if j < len(inner.shape) else 1
        i, j = min(i + 1, len(outer.shape)), min(j + 1, len(inner.shape))
        while size_out != size_in:
            grow_out = j == len(inner.shape) or (
                i < len(outer.shape)
                and isinstance(size_out, int)
                and (not isinstance(size_in, int) or size_out < size_in)
            )
            if grow_out:
                size_out, i = size_out * outer.shape[i], i + 1
            else:
                size_in, j = size_in * inner.shape[j], j + 1
        outs, ins = range(group_out[0], i), range(group_in[0], j)
        flat = linear(tuple(index[k] for k in outs), tuple(nest.syntax.size(outer.shape[k]) for k in outs))
        result += _unflatten(nest, flat, [inner.shape[k] for k in ins], size_in)
    return tuple(result)


def _unflatten(nest: LoopNest, flat: str, sizes: list[Size], total: Size) -> list[str]:
    parts: list[str] = []
    rest: Size = 1
    for n, size in reversed(list(enumerate(sizes))):
        outermost = all(s == 1 for s in sizes[:n])
        quotient = flat if rest == 1 else nest.quotient(flat, nest.syntax.size(rest))
        if size == 1:
            parts.append("0")
        elif outermost:
            parts.append(quotient if rest == 1 else f"({quotient})")
        else:
            parts.append(f"(({quotient}) % {nest.syntax.size(size)})")
        rest = rest * size
    return parts[::-1]


def _transpose(nest: LoopNest, node: Node, index: Index) -> str:
    inner = [""] * len(index)
    for out_axis, in_axis in enumerate(node.attrs.permutation):
        inner[in_axis] = index[out_axis]
    return nest.emit(node.inputs[0], tuple(inner))


def _broadcast(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    return nest.emit(x, tuple("0" if s == 1 else index[a] for s, a in zip(x.type.shape, node.attrs.axes, strict=True)))


def _slice(nest: LoopNest, node: Node, index: Index) -> str:
    at = node.attrs
    moved = (add(nest.syntax.size(lo), mul(i, str(st))) for i, lo, st in zip(index, at.start, at.step, strict=True))
    return nest.emit(node.inputs[0], tuple(moved))


def _reverse(nest: LoopNest, node: Node, index: Index) -> str:
    shape = nest.shape(node.out)
    flipped = (f"({shape[a]} - 1 - {i})" if a in node.attrs.axes else i for a, i in enumerate(index))
    return nest.emit(node.inputs[0], tuple(flipped))


def _pad(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    shape = nest.shape(x)
    inside, clamped = [], []
    for i, lo, hi, size in zip(index, node.attrs.low, node.attrs.high, shape, strict=True):
        if lo == hi == 0:
            clamped.append(i)
            continue
        place = nest.named(f"{i} - {lo}")
        inside.append(nest.inside(place, size))
        clamped.append(nest.named(nest.clamp(place, size)))
    value = nest.emit(x, tuple(clamped))
    fill = nest.syntax.constant(node.attrs.value, node.out.type.dtype)
    return nest.keep(node.out, index, nest.syntax.select(nest.every(inside), value, fill))


def _one_piece(nest: LoopNest, node: Node, index: Index) -> str | None:
    """A concatenation along a loop variable whose range lies in one part; else asks for cuts at the parts' borders."""
    axis = node.attrs.axis
    sizes = [v.type.shape[axis] for v in node.inputs]
    if nest.piece is None or index[axis] != nest.piece[0] or not all(isinstance(s, int) for s in sizes):
        return None
    _, low, high = nest.piece
    start = 0
    for value, size in zip(node.inputs, sizes, strict=True):
        assert isinstance(size, int)
        if start <= low and high <= start + size:
            local = f"({index[axis]} - {start})" if start else index[axis]
            return nest.emit(value, (*index[:axis], local, *index[axis + 1 :]))
        start += size
        nest.cuts.add(start)
    return None


def _concatenate(nest: LoopNest, node: Node, index: Index) -> str:
    found = _one_piece(nest, node, index)
    if found is not None:
        return found
    axis, start, result = node.attrs.axis, "0", ""
    place = index[axis]
    parts: list[tuple[str, str]] = []
    for x in node.inputs:
        size = nest.shape(x)[axis]
        local = f"({place} - {start})" if start != "0" else place
        safe = nest.named(nest.clamp(local, size))
        start = add(start, size)
        parts.append((start, nest.emit(x, (*index[:axis], safe, *index[axis + 1 :]))))
    result = parts[-1][1]
    for end, value in reversed(parts[:-1]):
        result = nest.syntax.select(f"{place} < {end}", value, result)
    return nest.keep(node.out, index, result)


def _constant(nest: LoopNest, node: Node, index: Index) -> str:
    return nest.syntax.constant(node.attrs.value, node.attrs.dtype)


def _iota(nest: LoopNest, node: Node, index: Index) -> str:
    return nest.index_value(index[node.attrs.axis], node.attrs.dtype)


def _gather(nest: LoopNest, node: Node, index: Index) -> str:
    x, at = node.inputs
    axis, rank = node.attrs.axis, at.type.rank
    place = nest.named(nest.emit(at, index[axis : axis + rank]))
    return nest.emit(x, (*index[:axis], place, *index[axis + rank :]))


def _gather_elements(nest: LoopNest, node: Node, index: Index) -> str:
    x, at = node.inputs
    axis = node.attrs.axis
    return nest.emit(x, (*index[:axis], nest.named(nest.emit(at, index)), *index[axis + 1 :]))


def _last_rows(nest: LoopNest, node: Node, index: Index) -> str:
    x, starts = node.inputs
    place = nest.named(f"{nest.emit(starts, (add(index[0], '1'),))} - 1")
    return nest.emit(x, (place, *index[1:]))


def _feed_tokens(nest: LoopNest, node: Node, index: Index) -> str:
    tokens, positions, rows, slots, history = node.inputs
    token = nest.emit(tokens, index)
    unknown = f"({token} < 0)"
    with nest.guarded(unknown):
        position, row = nest.emit(positions, index), nest.named(nest.emit(rows, index))
        past = nest.emit(history, (nest.named(nest.emit(slots, (row,))), nest.named(position)))
    return nest.keep(node.out, index, nest.syntax.select(unknown, past, token))


def _same(nest: LoopNest, node: Node, index: Index) -> str:
    return nest.emit(node.inputs[0], index)


VIEWS: dict[str, Callable[[LoopNest, Node, Index], str]] = {
    "reshape": _reshape, "transpose": _transpose, "broadcast_in_dim": _broadcast, "slice": _slice,
    "reverse": _reverse, "pad": _pad, "concatenate": _concatenate, "constant": _constant, "iota": _iota,
    "gather": _gather, "gather_elements": _gather_elements, "last_rows": _last_rows, "feed_tokens": _feed_tokens, "repack": _same,
}  # fmt: skip
