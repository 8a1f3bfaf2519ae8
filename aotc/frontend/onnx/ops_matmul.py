"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.errors import SourceError
from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, broadcast_shape
from aotc.frontend.onnx.known import Tensor, known
from aotc.frontend.onnx.tensors import plain
from aotc.ir.ops.contraction import DotAttrs

Row = Callable[..., Tensor]


def matmul(b: Emitter, x: Tensor, y: Tensor) -> Tensor:
    """Numpy's matmul: vectors get a unit axis for a while, batch axes broadcast."""
    if x.type.rank == y.type.rank == 1:
        return b.emit("dot_general", x, y, attrs=DotAttrs((0,), (0,)))
    if x.type.rank == 1:
        row = matmul(b, b.reshape(x, (1, *x.type.shape)), y)
        return b.reshape(row, (*row.type.shape[:-2], row.type.shape[-1]))
    if y.type.rank == 1:
        column = matmul(b, x, b.reshape(y, (*y.type.shape, 1)))
        return b.reshape(column, column.type.shape[:-1])
    if all(s == 1 for s in y.type.shape[:-2]):
        more = max(y.type.rank - x.type.rank, 0)
        x = b.reshape(x, (1,) * more + x.type.shape)
        y = b.reshape(y, y.type.shape[-2:])
        return b.emit("dot_general", x, y, attrs=DotAttrs((x.type.rank - 1,), (0,)))
    batch = broadcast_shape(x.type.shape[:-2], y.type.shape[:-2])
    x, y = (b.broadcast(v, (*batch, *v.type.shape[-2:])) for v in (x, y))
    axes = tuple(range(len(batch)))
    return b.emit("dot_general", x, y, attrs=DotAttrs((len(axes) + 1,), (len(axes),), axes, axes))


def _gemm(b: Emitter, n: Call, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    left, right = (0,) if n.attr_int("transA", 0) else (1,), (1,) if n.attr_int("transB", 0) else (0,)
    out = b.emit("dot_general", x, y, attrs=DotAttrs(left, right))
    if n.attr_float("alpha", 1.0) != 1:
        out = b.op("multiply", out, n.attr_float("alpha"))
    beta = n.attr_float("beta", 1.0)
    if bias is None or beta == 0:
        return out
    return b.op("add", out, bias if beta == 1 else b.op("multiply", bias, beta))


def _einsum(b: Emitter, n: Call, *operands: Tensor) -> Tensor:
    labels, result = _parse(n, n.attr_string("equation"), operands)
    tensors = list(operands)
    whole: dict[str, object] = {}
    for word, x in zip(labels, tensors, strict=True):
        for label, size in zip(word, x.type.shape, strict=True):
            whole[label] = size if whole.get(label, 1) == 1 else whole[label]
    for i, word in enumerate(labels):
        tensors[i], labels[i] = _diagonals(b, n, *_without_units(b, tensors[i], word, whole))
    x, word = _sum_out(b, tensors[0], labels[0], set(result).union(*labels[1:]))
    for i in range(1, len(tensors)):
        kept = set(result).union(*labels[i + 1 :])
        y, other = _sum_out(b, tensors[i], labels[i], kept | set(word))
        x, word = _contract(b, x, word, y, other, kept)
        x, word = _sum_out(b, x, word, kept)
    return b.transpose(x, [word.index(label) for label in result])


def _parse(n: Call, equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Labels of each operand and of the result; the axes of an ellipsis get digits, counted from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    words = left.split(",")
    if len(words) != len(operands):
        raise SourceError(f"{n}: '{plain(equation)}' names {len(words)} operands, not {len(operands)}")
    digits, longest = "9876543210", 0
    for i, (word, x) in enumerate(zip(words, operands, strict=True)):
        count = x.type.rank - len(word.replace("...", ""))
        if "..." in word:
            longest = max(longest, count)
            words[i] = word.replace("...", digits[len(digits) - count :])
        if len(words[i]) != x.type.rank:
            raise SourceError(f"{n}: '{plain(equation)}' does not fit an operand with {x.type.rank} axes")
    if arrow:
        result = right.replace("...", digits[len(digits) - longest :])
    else:
        every = "".join(words)
        result = digits[len(digits) - longest :] + "".join(
            sorted(c for c in set(every) if c.isalpha() and every.count(c) == 1)
        )
    return words, result


def _without_units(b: Emitter, x: Tensor, word: str, whole: dict[str, object]) -> tuple[Tensor, str]:
    """Axes of size 1 that broadcast against longer ones are dropped: the product repeats them."""
    kept = [i for i, label in enumerate(word) if x.type.shape[i] == whole[label] or x.type.shape[i] != 1]
    return b.reshape(x, tuple(x.type.shape[i] for i in kept)), "".join(word[i] for i in kept)


def _diagonals(b: Emitter, n: Call, x: Tensor, word: str) -> tuple[Tensor, str]:
    """A label that occurs twice in one operand takes the diagonal."""
    for label in dict.fromkeys(word):
        while word.count(label) > 1:
            i = word.index(label)
            j = word.index(label, i + 1)
            size = x.type.shape[i]
            if not isinstance(size, int):
                raise n.refusal(f"takes the diagonal of the dynamic dim {size}: make it static")
            n.counted(size)
            rest = [a for a in range(x.type.rank) if a not in (i, j)]
            flat = b.transpose(x, [*rest, i, j])
            flat = b.reshape(flat, (*flat.type.shape[:-2], size * size))
            x = b.take(flat, known(np.arange(size, dtype=np.int64) * (size + 1)), len(rest))
            word = "".join(word[a] for a in rest) + label
    return x, word


def _sum_out(b: Emitter, x: Tensor, word: str, kept: set[str]) -> tuple[Tensor, str]:
    axes = [i for i, label in enumerate(word) if label not in kept]
    return b.reduce("sum", x, axes), "".join(label for label in word if label in kept)


def _contract(b: Emitter, x: Tensor, word: str, y: Tensor, other: str, kept: set[str]) -> tuple[Tensor, str]:
    shared = [label for label in word if label in other]
    batch = [label for label in shared if label in kept]
    summed = [label for label in shared if label not in kept]
    places = [tuple(w.index(label) for label in part) for part in (summed, batch) for w in (word, other)]
    out = b.emit("dot_general", x, y, attrs=DotAttrs(*places))
    free = [label for w in (word, other) for label in w if label not in shared]
    return out, "".join((*batch, *free))


OPS: dict[str, Row] = {
    "MatMul": lambda b, n, x, y: matmul(b, x, y),
    "Gemm": _gemm,
    "Einsum": _einsum,
}
