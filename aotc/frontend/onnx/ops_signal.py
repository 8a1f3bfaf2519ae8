"""Signal processing and losses: Fourier transforms by matrices, windows, mel weights, log-likelihood losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from aotc.errors import SourceError
from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, known_scalar
from aotc.frontend.onnx.known import Tensor, known
from aotc.frontend.onnx.ops_norm import log_softmax
from aotc.frontend.onnx.tensors import dtype_of
from aotc.ir.dtypes import DType, i64
from aotc.ir.ops.contraction import DotAttrs
from aotc.ir.sizes import product

Row = Callable[..., Tensor | Sequence[Tensor]]
_LONGEST = 4096  # a transform is a matrix product here, its matrix has this size squared at most


def _fourier(b: Emitter, n: Call, x: Tensor, length: int, inverse: bool, onesided: bool) -> Tensor:
    """The transform along the axis before the last, which holds real and imaginary parts (or real parts alone)."""
    *outer, have, parts = x.type.shape
    if parts not in (1, 2):
        raise n.misfit(f"{parts} parts of a number: real, or real and imaginary", parts)
    if not isinstance(have, int) or length > _LONGEST:
        raise n.refusal(f"transforms {have} elements to {length}: make them static, at most {_LONGEST}")
    real_out = inverse and onesided
    used = length // 2 + 1 if real_out else length
    x = b.slice(x, x.type.rank - 2, 0, min(have, used))
    rows, columns = np.arange(min(have, used)), np.arange(length // 2 + 1 if onesided and not inverse else length)
    turn = 2 * np.pi * np.outer(rows, columns) / length * (1 if inverse else -1)
    scale = np.full((len(rows), 1), 1 / length if inverse else 1.0)
    if real_out:  # the other half mirrors this one, conjugated
        scale[(rows > 0) & (2 * rows != length)] *= 2
    cos, sin = (known(scale * f(turn), x.type.dtype) for f in (np.cos, np.sin))
    pieces = [b.reshape(b.slice(x, x.type.rank - 1, i, i + 1), (*outer, len(rows))) for i in range(int(parts))]  # type: ignore[arg-type]

    def times(matrix: Tensor, piece: int) -> Tensor:
        return b.emit("dot_general", pieces[piece], matrix, attrs=DotAttrs((len(outer),), (0,)))

    real, imaginary = times(cos, 0), times(sin, 0)
    if len(pieces) == 2:
        real = b.op("subtract", real, times(sin, 1))
        imaginary = b.op("add", imaginary, times(cos, 1))
    results = [real] if real_out else [real, imaginary]
    return b.concatenate([b.reshape(r, (*r.type.shape, 1)) for r in results], len(outer) + 1)


def _dft(b: Emitter, n: Call, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    rank = x.type.rank
    place = n.attr_int("axis", 1) if n.opset < 20 else -2 if axis is None else n.integers(axis)[0]
    place = n.axis(place, rank)
    inverse, onesided = bool(n.attr_int("inverse", 0)), bool(n.attr_int("onesided", 0))
    have = x.type.shape[place]
    if length is not None:
        (count,) = n.integers(length)
    elif isinstance(have, int):
        count = 2 * (have - 1) if inverse and onesided else have
    else:
        raise n.refusal(f"transforms the dynamic dim {have}: make it static")
    order = [i for i in range(rank) if i not in (place, rank - 1)] + [place, rank - 1]
    out = _fourier(b, n, b.transpose(x, order), count, inverse, onesided)
    return b.transpose(out, [order.index(i) for i in range(rank)])


def _stft(
    b: Emitter, n: Call, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None
) -> Tensor:
    signal = x.type.shape[1]
    if not isinstance(signal, int):
        raise n.refusal(f"cuts the dynamic dim {signal} into frames: make it static")
    hop = n.integers(step)[0]
    frame = signal if window is None else int(window.type.shape[0])  # type: ignore[arg-type]
    if length is not None:
        frame = n.integers(length)[0]
    if hop < 1 or not 1 <= frame <= signal:
        raise SourceError(f"{n}: frames of {frame} elements, {hop} apart, of a signal of {signal}")
    n.counted((signal - frame) // hop * frame)
    index = np.arange((signal - frame) // hop + 1)[:, None] * hop + np.arange(frame)
    frames = b.take(x, known(index.astype(np.int64)), 1)
    if window is not None:
        frames = b.op("multiply", frames, b.broadcast(window, frames.type.shape, (2,)))
    return _fourier(b, n, frames, frame, False, bool(n.attr_int("onesided", 1)))


def _window(*coefficients: float) -> Row:
    """Cosine windows: the sum of c_k cos(2 pi k i / N)."""

    def row(b: Emitter, n: Call, size: Tensor) -> Tensor:
        (count,) = n.integers(size)
        n.counted(count)
        period = count if n.attr_int("periodic", 1) else count - 1
        turn = 2 * np.pi * np.arange(count) / max(period, 1)
        values = sum(c * np.cos(k * turn) for k, c in enumerate(coefficients))
        return known(np.asarray(values), _output_type(n))

    return row


def _output_type(n: Call) -> DType:
    return dtype_of(n.attr_int("output_datatype", TensorProto.FLOAT), str(n))


def _mel(b: Emitter, n: Call, bins: Tensor, length: Tensor, rate: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Triangles on the mel scale, 2595 log10(1 + f / 700)."""
    (count,), (size,), (samples,) = (n.integers(p) for p in (bins, length, rate))
    n.counted(count * size)
    edges = [2595 * math.log10(1 + float(n.array(p).reshape(())) / 700) for p in (low, high)]
    mels = edges[0] + np.arange(count + 2) * (edges[1] - edges[0]) / (count + 2)
    places = ((size + 1) * 700 * (10 ** (mels / 2595) - 1) // samples).astype(np.int64)
    out = np.zeros((size // 2 + 1, count))
    for i in range(count):
        left, middle, right = places[i : i + 3]
        rising, falling = np.arange(left, middle + 1), np.arange(middle, right)
        out[rising, i] = (rising - left) / (middle - left) if middle > left else 1
        if right > middle:
            out[falling, i] = (right - falling) / (right - middle)
    return known(out, _output_type(n))


def _likelihood(b: Emitter, n: Call, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """-x[target], weighted: x [batch, classes, ...], target [batch, ...]; `ignore_index` counts for nothing."""
    shape, dtype, rank = target.type.shape, logits.type.dtype, logits.type.rank
    classes = logits.type.shape[1]
    ignored = n.attr_int("ignore_index", 0) if n.has("ignore_index") else None
    place = b.inside(target, classes)
    column = b.reshape(place, (shape[0], 1, *shape[1:]))
    chosen = b.reshape(b.take(logits, column, 1, elements=True), shape)
    loss = b.op("negate", chosen)
    factor = b.scalar(1, dtype, shape) if weight is None else b.take(weight, place, 0)
    if ignored is not None:
        factor = b.select(b.compare("EQ", target, ignored), 0, factor)
    loss = b.op("multiply", loss, factor)
    reduction = n.attr_string("reduction", "mean")
    axes = tuple(range(rank - 1))
    if reduction == "none":
        return loss
    total = b.reduce("sum", loss, axes)
    if reduction == "sum":
        return total
    if weight is None and ignored is None:
        return b.op("divide", total, b.convert(known_scalar(product(shape)), dtype))
    return b.op("divide", total, b.reduce("sum", factor, axes))


def _nll_loss(b: Emitter, n: Call, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return _likelihood(b, n, x, b.convert(target, i64), weight)


def _cross_entropy(b: Emitter, n: Call, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Sequence[Tensor]:
    logarithms = log_softmax(b, x, 1)
    return [_likelihood(b, n, logarithms, b.convert(target, i64), weight), logarithms]


OPS: dict[str, Row] = {
    "DFT": _dft,
    "STFT": _stft,
    "HannWindow": _window(0.5, -0.5),
    "HammingWindow": _window(25 / 46, -21 / 46),
    "BlackmanWindow": _window(0.42, -0.5, 0.08),
    "MelWeightMatrix": _mel,
    "NegativeLogLikelihoodLoss": _nll_loss,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
