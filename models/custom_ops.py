"""Custom ops that models call and the front end maps one to one to the IR. They trace, they do not run."""

from __future__ import annotations

import torch
from torch import Tensor


def _traced_only(name: str) -> RuntimeError:
    return RuntimeError(f"aotc::{name} is traced by the compiler, it does not run in PyTorch")


@torch.library.custom_op("aotc::kv_append", mutates_args=())
def kv_append(kv: Tensor, k: Tensor, v: Tensor, positions: Tensor, rows: Tensor, kv_index: Tensor) -> Tensor:
    """The cache with k, v [tokens, kv_heads, d] written at their positions. See `aotc.ir.ops.decoder`."""
    raise _traced_only("kv_append")


@kv_append.register_fake
def _(kv: Tensor, k: Tensor, v: Tensor, positions: Tensor, rows: Tensor, kv_index: Tensor) -> Tensor:
    return torch.empty_like(kv)


@torch.library.custom_op("aotc::attention", mutates_args=())
def attention(
    q: Tensor, kv: Tensor, query_start: Tensor, seq_lens: Tensor, kv_index: Tensor, scale: float, window: int
) -> Tensor:
    """Causal attention of q [tokens, heads, d] over the cache; `window` 0 sees everything."""
    raise _traced_only("attention")


@attention.register_fake
def _(
    q: Tensor, kv: Tensor, query_start: Tensor, seq_lens: Tensor, kv_index: Tensor, scale: float, window: int
) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("aotc::last_rows", mutates_args=())
def last_rows(x: Tensor, query_start: Tensor) -> Tensor:
    """x [tokens, n] at the last token of each row: [rows, n]."""
    raise _traced_only("last_rows")


@last_rows.register_fake
def _(x: Tensor, query_start: Tensor) -> Tensor:
    return x.new_empty((query_start.shape[0] - 1, *x.shape[1:]))


@torch.library.custom_op("aotc::self_attention", mutates_args=())
def self_attention(qkv: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Each token of qkv [batch, length, 3, heads, d] over all of its sequence. See `aotc.ir.ops.encoder`."""
    raise _traced_only("self_attention")


@self_attention.register_fake
def _(qkv: Tensor, lengths: Tensor, scale: float) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], *qkv.shape[3:]))
