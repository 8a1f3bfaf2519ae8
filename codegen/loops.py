"""Computes any body of a fusion as a loop nest: index expressions flow from the output back to the loads.

`LoopNest.emit(value, index)` returns the name of a scalar that holds `value[index]`, after adding the statements
that compute it to the innermost scope whose loop variables the index needs. So what depends on the row alone is
computed once a row, and a reduction becomes a loop of its own just there. Views are index arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aotc.ir.builder import Builder
from aotc.ir.dtypes import DType, bool_, f32, f64, i64
from aotc.ir.graph import Graph, Node, TensorType, Value
from aotc.ir.ops import OPS
from aotc.ir.ops.contraction import free_axes
from aotc.ir.sizes import Size

Index = tuple[str, ...]


class Syntax(Protocol):
    """How a target writes things."""

    def size(self, size: Size) -> str: ...
    def declare(self, dtype: DType, name: str, expression: str) -> str: ...
    def load(self, pointer: str, dtype: DType, offset: str) -> str: ...
    def constant(self, value: Any, dtype: DType) -> str: ...
    def convert(self, expression: str, source: DType, target: DType) -> str: ...
    def call(self, op: str, dtype: DType, args: list[str], attrs: Any) -> str: ...
    def select(self, condition: str, yes: str, no: str) -> str: ...
    def packed_offset(self, packing: str, index: Index, shape: tuple[str, ...]) -> str: ...


@dataclass
class Scope:
    """A loop body being written: the names declared in it, its lines, and what it already computed."""

    variables: frozenset[str]
    lines: list[str] = field(default_factory=list)
    known: dict[tuple[Value, Index], str] = field(default_factory=dict)


class LoopNest:
    """Emits statements for values of `body`. `pointers` names the memory of the body's inputs."""

    def __init__(self, body: Graph, syntax: Syntax, pointers: dict[Value, str]) -> None:
        self.body, self.syntax, self.pointers = body, syntax, pointers
        self.producer = body.producers()
        self.scopes = [Scope(frozenset())]
        self.given: dict[Value, Callable[[Index], str]] = {}
        self._counter = 0

    def name(self, prefix: str = "t") -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    @contextmanager
    def scope(self, *variables: str) -> Iterator[Scope]:
        """Opens a loop body over `variables`; its lines are the caller's to place."""
        self.scopes.append(Scope(frozenset(variables)))
        yield self.scopes[-1]
        self.scopes.pop()

    def emit(self, value: Value, index: Index) -> str:
        """The scalar `value[index]`, in the register type of its dtype."""
        for scope in reversed(self.scopes):
            if (value, index) in scope.known:
                return scope.known[value, index]
        depth = self._depth(index)
        if value in self.given:
            return self._keep(depth, value, index, self.given[value](index))
        node = self.producer.get(value)
        if node is None:
            return self._keep(depth, value, index, self._load(value, index))
        if node.op in _VIEWS:
            return _VIEWS[node.op](self, node, index)
        if node.op in _REDUCTIONS:
            with self._at(depth):
                return self._keep(depth, value, index, _REDUCTIONS[node.op](self, node, index), declared=True)
        args = [self.emit(v, index) for v in node.inputs]
        expression = self.syntax.call(node.op, value.type.dtype, args, node)
        return self._keep(depth, value, index, expression)

    def line(self, text: str) -> None:
        self.scopes[-1].lines.append(text)

    def keep(self, value: Value, index: Index, expression: str) -> str:
        """Names an expression, in the innermost scope that it needs."""
        return self._keep(self._depth((*index, expression)), value, index, expression)

    def own(self, name: str) -> str:
        """Registers a name that a line of the current scope declares."""
        self.scopes[-1].variables |= {name}
        return name

    def _keep(self, depth: int, value: Value, index: Index, expression: str, declared: bool = False) -> str:
        scope = self.scopes[depth]
        if not declared:
            name = self.name()
            scope.lines.append(self.syntax.declare(value.type.dtype, name, expression))
            scope.variables |= {name}
            expression = name
        scope.known[value, index] = expression
        return expression

    def _depth(self, index: Index) -> int:
        """The innermost scope that binds a variable of the index."""
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join(index)))
        for depth in range(len(self.scopes) - 1, 0, -1):
            if self.scopes[depth].variables & words:
                return depth
        return 0

    @contextmanager
    def _at(self, depth: int) -> Iterator[None]:
        """Writes into an outer scope for a while."""
        saved = self.scopes
        self.scopes = saved[: depth + 1]
        yield
        self.scopes = saved

    def shape(self, value: Value) -> tuple[str, ...]:
        return tuple(self.syntax.size(s) for s in value.type.shape)

    def _load(self, value: Value, index: Index) -> str:
        type_ = value.type
        if type_.packing is not None:
            offset = self.syntax.packed_offset(type_.packing, index, self.shape(value))
        else:
            offset = linear(index, self.shape(value))
        return self.syntax.load(self.pointers[value], type_.dtype, offset)

    def reduce_loop(
        self, dtype: DType, start: str, ranges: list[str], step: Callable[[list[str]], str], combine: Callable[[str, str], str],
        kind: str = "",
    ) -> str:
        """A loop over `ranges` that folds what `step` emits into an accumulator, written into the current scope."""
        total = self.name("acc")
        variables = [self.name("r") for _ in ranges]
        with self.scope(*variables) as inner:
            folded = combine(total, step(variables))
        wide = accumulator_of(dtype)
        self.line(self.syntax.declare(wide, total, start).replace("const ", "", 1))
        heads = self.loop_heads(variables, ranges, total, kind)
        for head in heads:
            self.line(head)
        self.scopes[-1].lines += ["  " + text for text in inner.lines]
        self.line(f"  {total} = {folded};")
        self.line("}" * len(ranges))
        return total

    def loop_heads(self, variables: list[str], ranges: list[str], total: str, kind: str) -> list[str]:
        heads = [f"for (int64_t {v} = 0; {v} < {n}; ++{v}) {{" for v, n in zip(variables, ranges, strict=True)]
        if kind and heads:
            heads.insert(len(heads) - 1, f"#pragma omp simd reduction({kind}:{total})")
        return heads


def accumulator_of(dtype: DType) -> DType:
    """What a kernel accumulates in: f32 for floats up to 32 bits, i64 for integers."""
    if dtype.is_float:
        return f64 if dtype.itemsize == 8 else f32
    return dtype if dtype == bool_ else i64


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
                i < len(outer.shape) and isinstance(size_out, int) and (not isinstance(size_in, int) or size_out < size_in)
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
        quotient = flat if rest == 1 else f"({flat}) / {nest.syntax.size(rest)}"
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


def _named(nest: LoopNest, expression: str) -> str:
    """An index computed once, in the innermost scope that its variables need."""
    name = nest.name("k")
    scope = nest.scopes[nest._depth((expression,))]
    scope.lines.append(f"const int64_t {name} = {expression};")
    scope.variables |= {name}
    return name


def _pad(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    shape = nest.shape(x)
    inside, clamped = [], []
    for i, lo, hi, size in zip(index, node.attrs.low, node.attrs.high, shape, strict=True):
        if lo == hi == 0:
            clamped.append(i)
            continue
        place = _named(nest, f"{i} - {lo}")
        inside.append(f"{place} >= 0 && {place} < {size}")
        clamped.append(_named(nest, f"{place} < 0 ? 0 : {place} >= {size} ? {size} - 1 : {place}"))
    value = nest.emit(x, tuple(clamped))
    fill = nest.syntax.constant(node.attrs.value, node.out.type.dtype)
    inside_all = " && ".join(inside) or "true"
    return nest.keep(node.out, index, nest.syntax.select(inside_all, value, fill))


def _concatenate(nest: LoopNest, node: Node, index: Index) -> str:
    axis, start, result = node.attrs.axis, "0", ""
    place = index[axis]
    parts: list[tuple[str, str]] = []
    for x in node.inputs:
        size = nest.shape(x)[axis]
        local = f"({place} - {start})" if start != "0" else place
        safe = _named(nest, f"{local} < 0 ? 0 : {local} >= {size} ? {size} - 1 : {local}")
        start = add(start, size)
        parts.append((start, nest.emit(x, (*index[:axis], safe, *index[axis + 1 :]))))
    result = parts[-1][1]
    for end, value in reversed(parts[:-1]):
        result = nest.syntax.select(f"{place} < {end}", value, result)
    return nest.keep(node.out, index, result)


def _constant(nest: LoopNest, node: Node, index: Index) -> str:
    return nest.syntax.constant(node.attrs.value, node.attrs.dtype)


def _iota(nest: LoopNest, node: Node, index: Index) -> str:
    return nest.syntax.convert(f"(int64_t)({index[node.attrs.axis]})", i64, node.attrs.dtype)


def _gather(nest: LoopNest, node: Node, index: Index) -> str:
    x, at = node.inputs
    axis, rank = node.attrs.axis, at.type.rank
    place = _named(nest, nest.emit(at, index[axis : axis + rank]))
    return nest.emit(x, (*index[:axis], place, *index[axis + rank :]))


def _gather_elements(nest: LoopNest, node: Node, index: Index) -> str:
    x, at = node.inputs
    axis = node.attrs.axis
    return nest.emit(x, (*index[:axis], _named(nest, nest.emit(at, index)), *index[axis + 1 :]))


def _last_rows(nest: LoopNest, node: Node, index: Index) -> str:
    x, starts = node.inputs
    place = _named(nest, f"{nest.emit(starts, (add(index[0], '1'),))} - 1")
    return nest.emit(x, (place, *index[1:]))


def _same(nest: LoopNest, node: Node, index: Index) -> str:
    return nest.emit(node.inputs[0], index)


_VIEWS: dict[str, Callable[[LoopNest, Node, Index], str]] = {
    "reshape": _reshape, "transpose": _transpose, "broadcast_in_dim": _broadcast, "slice": _slice,
    "reverse": _reverse, "pad": _pad, "concatenate": _concatenate, "constant": _constant, "iota": _iota,
    "gather": _gather, "gather_elements": _gather_elements, "last_rows": _last_rows, "repack": _same,
}  # fmt: skip


def _reduce(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    at, shape = node.attrs, nest.shape(node.inputs[0])

    def element(variables: list[str]) -> str:
        full, outer, inner = [], iter(index), iter(variables)
        for axis in range(len(shape)):
            full.append(next(inner) if axis in at.axes else next(outer))
        return nest.emit(x, tuple(full))

    ranges = [shape[a] for a in sorted(at.axes)]
    return _fold(nest, at.kind, node.out.type.dtype, ranges, element)


def _fold(nest: LoopNest, kind: str, dtype: DType, ranges: list[str], element: Callable[[list[str]], str]) -> str:
    start = nest.syntax.call(f"start_{kind}", accumulator_of(dtype), [], None)
    combine = lambda a, e: nest.syntax.call(f"fold_{kind}", accumulator_of(dtype), [a, e], None)  # noqa: E731
    simd = {"sum": "+", "product": "*"}.get(kind, "") if dtype.is_float else ""
    total = nest.reduce_loop(dtype, start, ranges, element, combine, simd)
    name = nest.own(nest.name())
    nest.line(nest.syntax.declare(dtype, name, nest.syntax.convert(total, accumulator_of(dtype), dtype)))
    return name


def _dot(nest: LoopNest, node: Node, index: Index) -> str:
    a, b = node.inputs
    at = node.attrs
    left = free_axes(a.type.rank, at.lhs_batch, at.lhs_contracting)
    right = free_axes(b.type.rank, at.rhs_batch, at.rhs_contracting)
    batch, rest = index[: len(at.lhs_batch)], index[len(at.lhs_batch) :]
    shape = nest.shape(a)

    def element(variables: list[str]) -> str:
        ia: list[str] = [""] * a.type.rank
        ib: list[str] = [""] * b.type.rank
        for place, (i, j) in zip(batch, zip(at.lhs_batch, at.rhs_batch, strict=True), strict=True):
            ia[i] = ib[j] = place
        for v, (i, j) in zip(variables, zip(at.lhs_contracting, at.rhs_contracting, strict=True), strict=True):
            ia[i] = ib[j] = v
        for i, place in zip(left, rest[: len(left)], strict=True):
            ia[i] = place
        for j, place in zip(right, rest[len(left) :], strict=True):
            ib[j] = place
        wide = accumulator_of(node.out.type.dtype)
        args = [nest.syntax.convert(nest.emit(v, tuple(i)), v.type.dtype, wide) for v, i in ((a, ia), (b, ib))]
        return nest.syntax.call("multiply", wide, args, None)

    return _fold(nest, "sum", node.out.type.dtype, [shape[i] for i in at.lhs_contracting], element)


def _window_place(nest: LoopNest, out: str, k: str, stride: int, low: int, dilation: int, size: str) -> tuple[str, str]:
    """The input place of a window's element, clamped, and the condition that it lies inside."""
    place = _named(nest, f"{mul(out, str(stride))} + {mul(k, str(dilation))} - {low}")
    safe = _named(nest, f"{place} < 0 ? 0 : {place} >= {size} ? {size} - 1 : {place}")
    return safe, f"{place} >= 0 && {place} < {size}"


def _window_index(nest: LoopNest, at: Any, index: Index, ks: list[str], sizes: tuple[str, ...]) -> tuple[list[str], str]:
    fields = zip(index, ks, at.stride, at.low, at.dilation, sizes, strict=True)
    places = [_window_place(nest, o, k, st, lo, d, n) for o, k, st, lo, d, n in fields]
    padded = any(at.low) or any(at.high)
    return [p for p, _ in places], " && ".join(c for _, c in places) if padded else "true"


def _convolution(nest: LoopNest, node: Node, index: Index) -> str:
    x, w = node.inputs
    at, shape, kernel = node.attrs, nest.shape(x), nest.shape(w)
    channels = w.type.shape[1]
    per_group = node.out.type.shape[1] // at.groups
    group = mul(f"(({index[1]}) / {nest.syntax.size(per_group)})", nest.syntax.size(channels)) if at.groups > 1 else "0"

    def element(variables: list[str]) -> str:
        c, *ks = variables
        places, inside = _window_index(nest, at, index[2:], ks, shape[2:])
        value = nest.emit(x, (index[0], add(group, c), *places))
        wide = accumulator_of(node.out.type.dtype)
        weight = nest.emit(w, (index[1], c, *ks))
        product = nest.syntax.call("multiply", wide, [value, weight], None)
        return nest.syntax.select(inside, product, nest.syntax.constant(0, wide))

    return _fold(nest, "sum", node.out.type.dtype, [kernel[1], *kernel[2:]], element)


def _reduce_window(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    at, shape, dtype = node.attrs, nest.shape(node.inputs[0]), node.out.type.dtype

    def element(variables: list[str]) -> str:
        places, inside = _window_index(nest, at, index[2:], variables, shape[2:])
        value = nest.emit(x, (index[0], index[1], *places))
        empty = nest.syntax.call(f"start_{at.kind}", accumulator_of(dtype), [], None)
        return nest.syntax.select(inside, value, empty)

    return _fold(nest, at.kind, dtype, [str(n) for n in at.window], element)


def _arg_reduce(nest: LoopNest, node: Node, index: Index) -> str:
    """Keeps the best element and its place; NaN wins, as in numpy and torch."""
    (x,) = node.inputs
    at, dtype = node.attrs, x.type.dtype
    best, where, r = nest.name("best"), nest.name("where"), nest.name("r")
    length = nest.shape(x)[at.axis]
    with nest.scope(r) as inner:
        value = nest.emit(x, (*index[: at.axis], r, *index[at.axis :]))
    order = {"maximum": ">", "minimum": "<"}[at.kind] + ("=" if at.select_last else "")
    better = f"{r} == 0 || {value} {order} {best} || ({value} != {value} && {best} == {best})"
    kind = at.kind
    nest.line(nest.syntax.declare(dtype, best, nest.syntax.call(f"start_{kind}", accumulator_of(dtype), [], None)).replace("const ", "", 1))
    nest.line(f"int64_t {where} = 0;")
    nest.line(f"for (int64_t {r} = 0; {r} < {length}; ++{r}) {{")
    nest.scopes[-1].lines += ["  " + text for text in inner.lines]
    nest.line(f"  if ({better}) {{ {best} = {value}; {where} = {r}; }}")
    nest.line("}")
    return nest.own(where)


_REDUCTIONS: dict[str, Callable[[LoopNest, Node, Index], str]] = {
    "reduce": _reduce, "dot_general": _dot, "convolution": _convolution, "reduce_window": _reduce_window,
    "arg_reduce": _arg_reduce,
}  # fmt: skip


def to_primitives(body: Graph) -> Graph:
    """The body with composites replaced by their decompositions."""
    if not any(OPS[n.op].decompose for n in body.nodes):
        return body
    builder = Builder(body.name, body.dims, (v.name for v in body.values()))
    env: dict[Value, Value] = {v: v for v in body.inputs}
    for node in body.nodes:
        inputs = tuple(env[v] for v in node.inputs)
        decompose = OPS[node.op].decompose
        if decompose is not None:
            env[node.out] = decompose(builder, inputs, node.attrs)
        else:
            outs = builder.emit_many(node.op, *inputs, attrs=node.attrs)
            env.update(zip(node.outputs, outs, strict=True))
    builder.inputs = list(body.inputs)
    outputs = {n: env[v] for n, v in zip(body.output_names, body.outputs, strict=True)}
    return builder.finish(outputs, body.aliases)
