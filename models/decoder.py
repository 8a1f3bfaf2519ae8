"""Decoder-only language models over flat tokens: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

The families differ in biases, in the norm of queries and keys and in the window of attention; all of that stands
in the config. Parameter names are Hugging Face's. Norms, rope and swiglu are plain PyTorch: rules raise them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aotc.models import custom_ops
from aotc.models.config import DecoderConfig

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(self.weight.dtype)


class Rotary(nn.Module):
    """Cosines and sines f32 [tokens, head_dim] of each position. `inv_freq` comes from `aotc.models.rope`."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(head_dim // 2, dtype=torch.float32))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self.inv_freq[None, :]  # type: ignore[index]
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, d], computed in f32."""
    wide, half = x.float(), x.shape[-1] // 2
    rotated = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    return (wide * cos[:, None, :] + rotated * sin[:, None, :]).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.window = c.sliding_window or 0
        qkv_bias = c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=qkv_bias)
        # Qwen2 has biases on q, k and v alone; Llama's attention_bias covers the output too.
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=qkv_bias and c.family != "qwen2")
        self.q_norm = RMSNorm(self.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        q = self.q_proj(x).view(-1, self.heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        kv = custom_ops.kv_append(kv, k, v, step.positions, step.rows, step.kv_index)
        scale = self.head_dim**-0.5
        out = custom_ops.attention(q, kv, step.query_start, step.seq_lens, step.kv_index, scale, self.window)
        return self.o_proj(out.view(-1, self.heads * self.head_dim)), kv


class MLP(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        attended, kv = self.self_attn(self.input_layernorm(x), rope, kv, step)
        x = x + attended.float()
        return x + self.mlp(self.post_attention_layernorm(x)).float(), kv


class Backbone(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Step:
    """What changes every step: see `aotc.ir.ops.decoder` for the shapes."""

    def __init__(self, positions: Tensor, rows: Tensor, query_start: Tensor, seq_lens: Tensor, kv_index: Tensor):
        self.positions, self.rows, self.query_start = positions, rows, query_start
        self.seq_lens, self.kv_index = seq_lens, kv_index


class Decoder(nn.Module):
    """tokens, step metadata and one cache a layer -> logits f32 [rows, vocab] of each row's last token, caches."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.model = Backbone(c)
        self.rotary = Rotary(c.head_dim)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.to(DTYPES[c.dtype])
        self.rotary.inv_freq = self.rotary.inv_freq.float()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        kv_index: Tensor,
        kv: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        step = Step(positions, rows, query_start, seq_lens, kv_index)
        embedded = self.model.embed_tokens(tokens)
        rope = self.rotary(positions)
        x = embedded.float()  # the residual stream stays f32: it costs little and keeps 16-bit models near f32
        caches = []
        for layer, cache in zip(self.model.layers, kv, strict=True):
            x, cache = layer(x, rope, cache, step)
            caches.append(cache)
        last = custom_ops.last_rows(x, query_start)
        return self.lm_head(self.model.norm(last)).float(), caches
