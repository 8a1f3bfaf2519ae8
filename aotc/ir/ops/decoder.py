"""Ops of decoders over flat tokens: KV cache, ragged attention, last rows, sampling.

A batch has `rows` sequences; row r owns the flat tokens query_start[r] .. query_start[r + 1]. `seq_lens[r]` counts
its tokens in the cache after this step, so token i of a row with n new tokens has position seq_lens - n + i.
The cache is a linear value. Static layout: kv [slots, 2, kv_heads, context, d], kv_index [rows] names slots.
Paged layout: kv [pages, 2, kv_heads, page_size, d], and in place of kv_index a block table [rows, max_pages]: position
p of a row lies in page table[row, p // page_size]. A static cache is a paged one with one page a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.ir.dtypes import f32, i32
from aotc.ir.graph import Attrs, TensorType
from aotc.ir.ops.op import Op, no_flops, require
from aotc.ir.ops.sample_reference import sample_rows
from aotc.ir.sizes import Size

MAX_LOGPROBS = 21  # the sampled token, then up to 20 best ones (OpenAI's bound)


@dataclass(frozen=True)
class KVAttrs(Attrs):
    """`layout` is static or paged."""

    layout: str = "static"


@dataclass(frozen=True)
class AttentionAttrs(KVAttrs):
    """Causal attention; `window` is how many latest positions a token sees, itself included (None: all)."""

    scale: float = 1.0
    window: int | None = None


def require_index(index: TensorType, layout: str) -> None:
    """Raises TypeError where a cache's index has not the rank of its layout: slots, or a block table."""
    require(index.rank == {"static": 1, "paged": 2}[layout], f"{index} is no index of a {layout} cache")


def _cache_view(kv: np.ndarray, index: np.ndarray, length: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """K and V of one sequence as [kv_heads, length, d]."""
    if layout == "static":
        return kv[index, 0, :, :length], kv[index, 1, :, :length]
    pages = index[: -(-length // kv.shape[3])]
    both = np.concatenate([kv[p] for p in pages], axis=2)
    return both[0, :, :length], both[1, :, :length]


def _kv_append_type(types: tuple[TensorType, ...], at: KVAttrs) -> tuple[TensorType, ...]:
    kv, k, v, positions, rows, index = types
    require_index(index, at.layout)
    require(kv.rank == 5 and k == v and k.rank == 3, f"kv_append: {types}")
    require((k.shape[1], k.shape[2]) == (kv.shape[2], kv.shape[4]), f"kv_append: {k} does not fit {kv}")
    require(k.dtype == kv.dtype and positions.shape == rows.shape == k.shape[:1], f"kv_append: {types}")
    return (kv,)


def _kv_append(arrays: Any, at: KVAttrs, _: Any) -> np.ndarray:
    kv, k, v, positions, rows, index = arrays
    kv = kv.copy()
    for t, (position, row) in enumerate(zip(positions, rows, strict=True)):
        if at.layout == "static":
            block, place = index[row], position
        else:
            block, place = index[row, position // kv.shape[3]], position % kv.shape[3]
        kv[block, 0, :, place], kv[block, 1, :, place] = k[t], v[t]
    return kv


def _attention_type(types: tuple[TensorType, ...], at: AttentionAttrs) -> tuple[TensorType, ...]:
    q, kv, *_rest = types
    require(q.rank == 3 and kv.rank == 5 and q.dtype == kv.dtype and len(types) == 5, f"attention: {types}")
    require_index(types[4], at.layout)
    require(q.shape[2] == kv.shape[4] and q.shape[1] % kv.shape[2] == 0, f"attention: {q} does not fit {kv}")  # type: ignore[operator]
    return (q,)


def _attention(arrays: Any, at: AttentionAttrs, _: Any) -> np.ndarray:
    q, kv, query_start, seq_lens, index = arrays
    out = np.zeros_like(q)
    group = q.shape[1] // kv.shape[2]
    for row, length in enumerate(seq_lens):
        span = slice(query_start[row], query_start[row + 1])
        new = span.stop - span.start
        if new == 0:
            continue
        k, v = (np.repeat(t, group, 0) for t in _cache_view(kv, index[row], length, at.layout))
        scores = np.einsum("thd,hld->htl", q[span], k) * at.scale
        position, key = np.arange(length - new, length)[:, None], np.arange(length)[None, :]
        visible = key <= position
        if at.window is not None:
            visible &= key > position - at.window
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[span] = np.einsum("htl,hld->thd", weights, v)
    return out


def _attention_cost(ins: tuple[TensorType, ...], _: Any, __: Any) -> Size:
    """An upper estimate: every query against half of the longest context."""
    q, kv, index = ins[0], ins[1], ins[4]
    return q.size * kv.shape[3] * 2 * (index.shape[1] if index.rank == 2 else 1)


def _sample_types(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    logits, settings, history, index = types
    rows = logits.shape[0]
    require(logits.dtype == f32 and settings.shape == (rows, 128) and history.rank == 2, f"sample: {types}")
    top = (rows, MAX_LOGPROBS)
    return TensorType(i32, (rows,)), TensorType(f32, top), TensorType(i32, top), history


def _sample(arrays: Any, _: Any, __: Any) -> Any:
    """See `sample_reference` for the order of filters; the token is also written to the row's history."""
    logits, settings, history, index = arrays
    return sample_rows(logits.astype(np.float32), settings, history.copy(), index)


def _feed_tokens_type(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    tokens, positions, rows, slots, history = types
    require(all(t.dtype == i32 for t in types) and tokens.rank == slots.rank == 1, f"feed_tokens: {types}")
    require(tokens == positions == rows and history.rank == 2, f"feed_tokens: {types}")
    return (tokens,)


def _feed_tokens(arrays: Any, _: Any, __: Any) -> np.ndarray:
    """The tokens of a step. Where the host does not know one yet, it says -1: it is the one that was sampled before, and
    lies in the history of the row's slot at its position."""
    tokens, positions, rows, slots, history = (np.asarray(a) for a in arrays)
    return np.where(tokens < 0, history[slots[rows], positions], tokens).astype(np.int32)


def _last_rows(types: tuple[TensorType, ...], _: Any) -> tuple[TensorType, ...]:
    x, query_start = types
    return (TensorType(x.dtype, (query_start.shape[0] - 1, *x.shape[1:])),)


OPS = (
    Op("kv_append", _kv_append_type, _kv_append, KVAttrs, no_flops, exact=True, linear=((0, 0),)),
    Op("attention", _attention_type, _attention, AttentionAttrs, _attention_cost),
    Op("feed_tokens", _feed_tokens_type, _feed_tokens, Attrs, no_flops, exact=True),
    Op("last_rows", _last_rows, lambda a, _, __: a[0][np.asarray(a[1])[1:] - 1], Attrs, no_flops, exact=True),
    Op("sample", _sample_types, _sample, Attrs, lambda i, _, __: i[0].size * 4, exact=True, linear=((3, 2),)),
)
