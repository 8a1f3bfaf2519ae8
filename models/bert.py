"""Text encoders of BERT's family over padded sequences, and the pooling that makes a vector of each.

Parameter names are Hugging Face's. Hidden states between layers stay f32, as a decoder's residual stream does; linear
layers compute in the weights' type. Tokens past a sequence's length reach no other token and no vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from aotc.models import custom_ops
from aotc.models.config import EncoderConfig
from aotc.models.decoder import DTYPES


class LayerNorm(nn.Module):
    """Of f32, whatever type its parameters have."""

    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(c.hidden_size)) for _ in range(2))
        self.eps = c.layer_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight.float(), self.bias.float(), self.eps)


class Embeddings(nn.Module):
    """All tokens are of type 0. Positions count from the left, so that padding must be on the right."""

    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_embeddings = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.token_type_embeddings = nn.Embedding(c.type_vocab_size, c.hidden_size)
        self.LayerNorm = LayerNorm(c)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.word_embeddings(input_ids).float() + self.token_type_embeddings.weight[0].float()
        return self.LayerNorm(x + self.position_embeddings.weight[: input_ids.shape[1]].float())


class SelfAttention(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.size = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = (self.query, self.key, self.value)  # one linear layer: its weight is joined at compile time
        weight, bias = torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
        qkv = functional.linear(x, weight, bias).view(*x.shape[:2], 3, self.heads, self.size)
        return custom_ops.self_attention(qkv, lengths, self.size**-0.5).view(x.shape)


class Output(nn.Module):
    """A linear layer whose result is added to what the block began with."""

    def __init__(self, c: EncoderConfig, inputs: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, c.hidden_size), LayerNorm(c)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x).float() + residual)


class Attention(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(c), Output(c, c.hidden_size)


class Intermediate(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.intermediate_size)


class Layer(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.attention, self.intermediate = Attention(c), Intermediate(c)
        self.output, self.activation = Output(c, c.intermediate_size), c.activation

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        dtype = self.intermediate.dense.weight.dtype
        x = self.attention.output(self.attention.self(x.to(dtype), lengths), x)
        return self.output(self.activate(self.intermediate.dense(x.to(dtype))), x)

    def activate(self, x: Tensor) -> Tensor:
        if self.activation == "relu":
            return functional.relu(x)
        return functional.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class Layers(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))


class Bert(nn.Module):
    """input_ids i32 [batch, length], lengths i32 [batch] (of 1 .. length) -> embeddings f32 [batch, hidden]."""

    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(c), Layers(c)
        self.pooling, self.normalize = c.pooling, c.normalize
        self.to(DTYPES[c.dtype])

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.encoder.layer:
            x = layer(x, lengths)
        pooled = pool(x, lengths, self.pooling)
        if self.normalize:
            pooled = pooled / pooled.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
        return pooled


def pool(x: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """x f32 [batch, length, hidden] to [batch, hidden], over each sequence's own tokens."""
    if kind == "cls":
        return x[:, 0]
    own = (torch.arange(x.shape[1], device=x.device, dtype=torch.int32)[None, :] < lengths[:, None])[:, :, None]
    if kind == "max":
        return x.masked_fill(~own, -torch.inf).amax(1)
    count = lengths.clamp(min=1).float()[:, None]
    return x.masked_fill(~own, 0.0).sum(1) / (count.sqrt() if kind == "mean_sqrt_len" else count)
