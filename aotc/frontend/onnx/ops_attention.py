"""Attention and what language models put around it: rotary embeddings, linear attention, causal convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aotc.frontend.onnx.call import Call
from aotc.frontend.onnx.emitter import Emitter, known_scalar
from aotc.frontend.onnx.known import Tensor
from aotc.frontend.onnx.ops_conv import channels
from aotc.frontend.onnx.ops_norm import softmax
from aotc.frontend.onnx.tensors import dtype_of
from aotc.ir.dtypes import bool_, f32, i64
from aotc.ir.ops.contraction import ConvAttrs, DotAttrs
from aotc.ir.sizes import Size

Row = Callable[..., Tensor | Sequence[Tensor]]


def split_heads(b: Emitter, x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * d] to [batch, heads, tokens, d]."""
    batch, tokens, width = x.type.shape
    return b.transpose(b.reshape(x, (batch, tokens, heads, width // heads)), (0, 2, 1, 3))


def join_heads(b: Emitter, x: Tensor) -> Tensor:
    """[batch, heads, tokens, d] to [batch, tokens, heads * d]."""
    batch, heads, tokens, width = x.type.shape
    return b.reshape(b.transpose(x, (0, 2, 1, 3)), (batch, tokens, heads * width))


def _attention(
    b: Emitter, n: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past_k: Tensor | None = None,
    past_v: Tensor | None = None, lengths: Tensor | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    flat = q.type.rank == 3
    if flat:
        q = split_heads(b, q, n.attr_int("q_num_heads"))
        k, v = (split_heads(b, x, n.attr_int("kv_num_heads")) for x in (k, v))
    if past_k is not None and past_v is not None:
        k, v = b.concatenate([past_k, k], 2), b.concatenate([past_v, v], 2)
    dtype, width = q.type.dtype, q.type.shape[3]
    if not isinstance(width, int):
        raise n.refusal(f"its head size {width} is dynamic: make it static")
    root = math.sqrt(n.attr_float("scale", 0.0) or 1 / math.sqrt(width))
    raw = _grouped_dot(b, b.op("multiply", q, root), b.op("multiply", k, root), (3, 3))
    cap = n.attr_float("softcap", 0.0)
    capped = b.op("multiply", b.op("tanh", b.op("divide", raw, cap)), cap) if cap else raw
    past = past_k.type.shape[2] if past_k is not None else 0
    bias = _bias(b, n, mask, lengths, q, capped.type.shape, past)
    scores = capped if bias is None else b.op("add", capped, bias)
    precision = dtype_of(n.attr_int("softmax_precision"), str(n)) if n.has("softmax_precision") else dtype
    weights = b.convert(softmax(b, b.convert(scores, precision), 3), dtype)
    if bias is not None:  # a row that may attend to nothing gives zeros
        dead = b.compare("EQ", b.reduce("maximum", bias, (bias.type.rank - 1,), True), -math.inf)
        weights = b.select(dead, 0, weights)
    out = _grouped_dot(b, weights, v, (3, 2))
    shown = (raw, capped, scores, weights)[n.attr_int("qk_matmul_output_mode", 0)]
    return [join_heads(b, out) if flat else out, k, v, shown]


def _grouped_dot(b: Emitter, x: Tensor, y: Tensor, axes: tuple[int, int]) -> Tensor:
    """x [batch, heads, rows, a] with y [batch, kv_heads, c, d] along `axes`; heads share those of y in groups."""
    batch, heads, rows, inner = x.type.shape
    shared = y.type.shape[1]
    if not isinstance(heads, int) or not isinstance(shared, int) or heads % shared:
        raise TypeError(f"{heads} query heads over {shared} key and value heads")
    grouped = b.reshape(x, (batch, shared, rows * (heads // shared), inner))
    out = b.emit("dot_general", grouped, y, attrs=DotAttrs((axes[0],), (axes[1],), (0, 1), (0, 1)))
    return b.reshape(out, (batch, heads, rows, out.type.shape[3]))


def _bias(
    b: Emitter, n: Call, mask: Tensor | None, lengths: Tensor | None, q: Tensor, shape: tuple[Size, ...], past: Size
) -> Tensor | None:
    """What is added to the scores: the mask, and minus infinity where a query may not attend; None for nothing."""
    dtype, (batch, _, rows, keys) = q.type.dtype, shape
    bias = None if mask is None else _padded_mask(b, n, mask, keys)
    if bias is not None and bias.type.dtype == bool_:
        bias = b.select(bias, b.scalar(0, dtype, bias.type.shape), -math.inf)
    offset = b.reshape(known_scalar(past), (1, 1))
    if lengths is not None:
        lengths = b.reshape(b.convert(lengths, i64), (batch, 1, 1, 1))
        offset = b.op("subtract", lengths, known_scalar(rows))
    here = b.op("add", b.iota(i64, (rows, 1)), offset)
    key = b.iota(i64, (1, keys), 1)
    left, right = (n.attr_int(f"{side}_window_size", -1) for side in ("left", "right"))
    rules = []
    if n.attr_int("is_causal", 0):
        rules.append(b.compare("LE", key, here))
    if left >= 0:
        rules.append(b.compare("GE", key, b.op("subtract", here, left)))
    if right >= 0:
        rules.append(b.compare("LE", key, b.op("add", here, right)))
    if lengths is not None:
        rules.append(b.compare("LT", key, lengths))
    for allowed in rules:
        fence = b.select(allowed, b.scalar(0, dtype, allowed.type.shape), -math.inf)
        bias = fence if bias is None else b.op("add", bias, fence)
    return bias


def _padded_mask(b: Emitter, n: Call, mask: Tensor, keys: Size) -> Tensor:
    """A mask may end before the keys do: the rest is masked."""
    have = mask.type.shape[-1]
    if have == keys or have == 1:
        return mask
    missing = keys - have
    if not isinstance(missing, int):
        raise n.refusal(f"a mask of {have} keys, of {keys}: give it all keys")
    high = [0] * (mask.type.rank - 1) + [missing]
    return b.pad(mask, [0] * len(high), high, False if mask.type.dtype == bool_ else -math.inf)


def _rotary(b: Emitter, n: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    flat = x.type.rank == 3
    heads = split_heads(b, x, n.attr_int("num_heads")) if flat else x
    if positions is not None:
        cos, sin = (b.take(table, positions, 0) for table in (cos, sin))
    rank, width = 4, heads.type.shape[3]
    turned = n.attr_int("rotary_embedding_dim", 0) or width
    if not isinstance(turned, int):
        raise n.refusal(f"its head size {width} is dynamic: make it static")
    rest = b.slice(heads, 3, turned, width) if turned != width else None
    part = b.slice(heads, 3, 0, turned)
    interleaved = n.attr_int("interleaved", 0)
    half = turned // 2
    if interleaved:
        x1, x2 = (b.slice(part, 3, start, turned, 2) for start in (0, 1))
    else:
        x1, x2 = b.slice(part, 3, 0, half), b.slice(part, 3, half, turned)
    cos, sin = (b.broadcast(t, x1.type.shape, (0, 2, 3)) for t in (cos, sin))
    real = b.op("subtract", b.op("multiply", cos, x1), b.op("multiply", sin, x2))
    imaginary = b.op("add", b.op("multiply", sin, x1), b.op("multiply", cos, x2))
    if interleaved:
        pairs = [b.reshape(t, (*t.type.shape, 1)) for t in (real, imaginary)]
        out = b.reshape(b.concatenate(pairs, rank), part.type.shape)
    else:
        out = b.concatenate([real, imaginary], 3)
    out = out if rest is None else b.concatenate([out, rest], 3)
    return join_heads(b, out) if flat else out


def _linear_attention(
    b: Emitter, n: Call, q: Tensor, k: Tensor, v: Tensor, past: Tensor | None = None, decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """The recurrence, unrolled token by token, in f32; the state is [batch, kv_heads, d_k, d_v]."""
    heads, shared = n.attr_int("q_num_heads"), n.attr_int("kv_num_heads")
    batch, tokens, _ = q.type.shape
    if not isinstance(tokens, int) or tokens > _MOST_STEPS:
        raise n.refusal(f"unrolls {tokens} tokens: make that dim static and at most {_MOST_STEPS}")
    dtype, state_dtype = q.type.dtype, past.type.dtype if past is not None else q.type.dtype
    q, k, v = (split_heads(b, b.convert(x, f32), h) for x, h in ((q, heads), (k, shared), (v, shared)))
    d_k, d_v = k.type.shape[3], v.type.shape[3]
    scale = n.attr_float("scale", 0.0) or 1 / math.sqrt(d_k)  # type: ignore[arg-type]
    state = b.scalar(0, f32, (batch, shared, d_k, d_v)) if past is None else b.convert(past, f32)
    gates = None if decay is None else split_heads(b, b.convert(decay, f32), shared)
    rates = None if beta is None else split_heads(b, b.convert(beta, f32), beta.type.shape[2])  # type: ignore[arg-type]
    outs = []
    for t in range(tokens):
        key, value = (b.slice(x, 2, t, t + 1) for x in (k, v))  # [batch, kv_heads, 1, d]
        column = b.transpose(key, (0, 1, 3, 2))
        if gates is not None:
            fade = b.op("exponential", b.transpose(b.slice(gates, 2, t, t + 1), (0, 1, 3, 2)))
            state = b.op("multiply", state, fade)
        if rates is not None:
            told = b.reduce("sum", b.op("multiply", state, column), (2,), True)
            value = b.op("multiply", b.slice(rates, 2, t, t + 1), b.op("subtract", value, told))
        state = b.op("add", state, b.op("multiply", column, value))
        outs.append(_grouped_dot(b, b.slice(q, 2, t, t + 1), state, (3, 2)))
    out = b.op("multiply", join_heads(b, b.concatenate(outs, 2)), scale)
    return [b.convert(out, dtype), b.convert(state, state_dtype)]


def _causal_conv(
    b: Emitter, n: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
) -> Sequence[Tensor]:
    batch, depth, length = x.type.shape
    k = weight.type.shape[2]
    if not isinstance(k, int) or not isinstance(depth, int):
        raise n.misfit(f"a kernel of size {k} over {depth} channels", k, depth)
    before = past if past is not None else b.scalar(0, x.type.dtype, (batch, depth, k - 1))
    whole = b.concatenate([before, x], 2) if k > 1 else x
    out = b.emit("convolution", whole, weight, attrs=ConvAttrs((1,), (0,), (0,), (1,), depth))
    if bias is not None:
        out = b.op("add", out, channels(b, bias, out))
    if n.attr_string("activation", "none") != "none":
        out = b.widened(lambda v: b.op("multiply", v, b.op("logistic", v)), out)
    if not n.wants(1):
        return [out]
    # The last k - 1 columns, cut from the end so that the start need not be known.
    tail = b.reverse(b.slice(b.reverse(whole, 2), 2, 0, k - 1), 2)
    return [out, tail]


_MOST_STEPS = 256

OPS: dict[str, Row] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "LinearAttention": _linear_attention,
    "CausalConvWithState": _causal_conv,
}
