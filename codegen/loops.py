"""Computes any body of a fusion as a loop nest: index expressions flow from the output back to the loads.

`LoopNest.emit(value, index)` returns the name of a scalar that holds `value[index]`, after adding the statements
that compute it to the innermost scope whose loop variables the index needs. So what depends on the row alone is
computed once a row, and a reduction becomes a loop of its own just there. Views are index arithmetic.

What is written in C here (declarations of indices, conditions, loops) is a method that a target with another
language overrides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aotc.codegen.views import VIEWS, Index, add, linear, mul
from aotc.ir.builder import Builder
from aotc.ir.dtypes import DType, bool_, f32, f64, i64
from aotc.ir.graph import Graph, Node, Value
from aotc.ir.ops import OPS
from aotc.ir.ops.contraction import free_axes
from aotc.ir.sizes import Size

__all__ = ["Index", "LoopNest", "Syntax", "accumulator_of", "add", "linear", "mul", "states_read", "to_primitives"]


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
    """Emits statements for values of `body`. `pointers` names the memory of the body's inputs.

    `piece` (variable, low, high) says that a loop variable stays in a range, so that a concatenation along it needs
    no choice an element; `cuts` collects the places where a loop should be cut for that.
    """

    def __init__(
        self, body: Graph, syntax: Syntax, pointers: dict[Value, str], strides: Mapping[Value, int] | None = None
    ) -> None:
        """`strides` has the distance of two slots, in elements, of states that the body reads."""
        self.body, self.syntax, self.pointers, self.strides = body, syntax, pointers, strides or {}
        self.producer = body.producers()
        self.scopes = [Scope(frozenset())]
        self.given: dict[Value, Callable[[Index], str]] = {}
        self.piece: tuple[str, int, int] | None = None
        self.cuts: set[int] = set()
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
        if node.op in VIEWS:
            return VIEWS[node.op](self, node, index)
        if node.op in _REDUCTIONS:
            with self._at(depth):
                return self._keep(depth, value, index, self._reduced(node, index), declared=True)
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
            offset = self._offset(value, index)
        return self.syntax.load(self.pointers[value], type_.dtype, offset)

    def _offset(self, value: Value, index: Index) -> str:
        if value in self.strides:
            return add(mul(index[0], str(self.strides[value])), linear(index[1:], self.shape(value)[1:]))
        return linear(index, self.shape(value))

    @contextmanager
    def guarded(self, condition: str) -> Iterator[None]:
        """What is emitted in here counts only where a condition holds; elsewhere it may read any place, or none."""
        yield

    def reduce_loop(
        self,
        dtype: DType,
        start: str,
        ranges: list[str],
        step: Callable[[list[str]], str],
        combine: Callable[[str, str], str],
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

    def _reduced(self, node: Node, index: Index) -> str:
        """Emits a reduction at `index` into the current scope; the name of its result."""
        return _REDUCTIONS[node.op](self, node, index)

    def fold(
        self, kind: str, dtype: DType, index: Index, ranges: list[str], element: Callable[[list[str]], str]
    ) -> str:
        """Folds what `element` emits over `ranges` by a reduction's `kind`; `index` is the place of the result."""
        wide = accumulator_of(dtype)
        start = self.syntax.call(f"start_{kind}", wide, [], None)
        combine = lambda a, e: self.syntax.call(f"fold_{kind}", wide, [a, e], None)  # noqa: E731
        simd = {"sum": "+", "product": "*"}.get(kind, "") if dtype.is_float else ""
        total = self.reduce_loop(dtype, start, ranges, element, combine, simd)
        name = self.own(self.name())
        self.line(self.syntax.declare(dtype, name, self.syntax.convert(total, wide, dtype)))
        return name

    def arg_fold(
        self, kind: str, last: bool, dtype: DType, index: Index, length: str, element: Callable[[str], str]
    ) -> str:
        """The place of the best of `length` elements, the last of equal ones if `last`. NaN wins, as in numpy."""
        best, where, r = self.name("best"), self.name("where"), self.name("r")
        with self.scope(r) as inner:
            value = element(r)
        order = {"maximum": ">", "minimum": "<"}[kind] + ("=" if last else "")
        better = f"{r} == 0 || {value} {order} {best} || ({value} != {value} && {best} == {best})"
        start = self.syntax.call(f"start_{kind}", accumulator_of(dtype), [], None)
        self.line(self.syntax.declare(dtype, best, start).replace("const ", "", 1))
        self.line(f"int64_t {where} = 0;")
        self.line(f"for (int64_t {r} = 0; {r} < {length}; ++{r}) {{")
        self.scopes[-1].lines += ["  " + text for text in inner.lines]
        self.line(f"  if ({better}) {{ {best} = {value}; {where} = {r}; }}")
        self.line("}")
        return self.own(where)

    def named(self, expression: str) -> str:
        """An index computed once, in the innermost scope that its variables need."""
        name = self.name("k")
        scope = self.scopes[self._depth((expression,))]
        scope.lines.append(self.declare_index(name, expression))
        scope.variables |= {name}
        return name

    def declare_index(self, name: str, expression: str) -> str:
        return f"const int64_t {name} = {expression};"

    def quotient(self, a: str, b: str) -> str:
        """a / b of indices, rounded down."""
        return f"({a}) / {b}"

    def clamp(self, place: str, size: str) -> str:
        """The index in 0 .. size - 1 that is next to `place`."""
        return f"{place} < 0 ? 0 : {place} >= {size} ? {size} - 1 : {place}"

    def inside(self, place: str, size: str) -> str:
        """The condition that an index lies within an axis."""
        return f"{place} >= 0 && {place} < {size}"

    def every(self, conditions: list[str]) -> str:
        """All conditions together."""
        return " && ".join(conditions) or "true"

    def index_value(self, index: str, dtype: DType) -> str:
        """An index as an element of `dtype`."""
        return self.syntax.convert(f"(int64_t)({index})", i64, dtype)

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


def _reduce(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    at, shape = node.attrs, nest.shape(node.inputs[0])

    def element(variables: list[str]) -> str:
        full, outer, inner = [], iter(index), iter(variables)
        for axis in range(len(shape)):
            full.append(next(inner) if axis in at.axes else next(outer))
        return nest.emit(x, tuple(full))

    ranges = [shape[a] for a in sorted(at.axes)]
    return nest.fold(at.kind, node.out.type.dtype, index, ranges, element)


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

    return nest.fold("sum", node.out.type.dtype, index, [shape[i] for i in at.lhs_contracting], element)


def _window_place(nest: LoopNest, out: str, k: str, stride: int, low: int, dilation: int, size: str) -> tuple[str, str]:
    """The input place of a window's element, clamped, and the condition that it lies inside."""
    place = nest.named(f"{mul(out, str(stride))} + {mul(k, str(dilation))} - {low}")
    return nest.named(nest.clamp(place, size)), nest.inside(place, size)


def _window_index(
    nest: LoopNest, at: Any, index: Index, ks: list[str], sizes: tuple[str, ...]
) -> tuple[list[str], str]:
    fields = zip(index, ks, at.stride, at.low, at.dilation, sizes, strict=True)
    places = [_window_place(nest, o, k, st, lo, d, n) for o, k, st, lo, d, n in fields]
    padded = any(at.low) or any(at.high)
    return [p for p, _ in places], nest.every([c for _, c in places] if padded else [])


def _convolution(nest: LoopNest, node: Node, index: Index) -> str:
    x, w = node.inputs
    at, shape, kernel = node.attrs, nest.shape(x), nest.shape(w)
    channels = w.type.shape[1]
    per_group = node.out.type.shape[1] // at.groups
    group = "0"
    if at.groups > 1:
        group = mul(f"({nest.quotient(index[1], nest.syntax.size(per_group))})", nest.syntax.size(channels))

    def element(variables: list[str]) -> str:
        c, *ks = variables
        places, inside = _window_index(nest, at, index[2:], ks, shape[2:])
        value = nest.emit(x, (index[0], add(group, c), *places))
        wide = accumulator_of(node.out.type.dtype)
        weight = nest.emit(w, (index[1], c, *ks))
        product = nest.syntax.call("multiply", wide, [value, weight], None)
        return nest.syntax.select(inside, product, nest.syntax.constant(0, wide))

    return nest.fold("sum", node.out.type.dtype, index, [kernel[1], *kernel[2:]], element)


def _reduce_window(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    at, shape, dtype = node.attrs, nest.shape(node.inputs[0]), node.out.type.dtype

    def element(variables: list[str]) -> str:
        places, inside = _window_index(nest, at, index[2:], variables, shape[2:])
        value = nest.emit(x, (index[0], index[1], *places))
        empty = nest.syntax.call(f"start_{at.kind}", accumulator_of(dtype), [], None)
        return nest.syntax.select(inside, value, empty)

    return nest.fold(at.kind, dtype, index, [str(n) for n in at.window], element)


def _arg_reduce(nest: LoopNest, node: Node, index: Index) -> str:
    (x,) = node.inputs
    at = node.attrs

    def element(r: str) -> str:
        return nest.emit(x, (*index[: at.axis], r, *index[at.axis :]))

    return nest.arg_fold(at.kind, at.select_last, x.type.dtype, index, nest.shape(x)[at.axis], element)


_REDUCTIONS: dict[str, Callable[[LoopNest, Node, Index], str]] = {
    "reduce": _reduce, "dot_general": _dot, "convolution": _convolution, "reduce_window": _reduce_window,
    "arg_reduce": _arg_reduce,
}  # fmt: skip


def states_read(body: Graph) -> list[Value]:
    """The states that a body reads by slots."""
    return [n.inputs[4] for n in body.nodes if n.op == "feed_tokens"]


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
