"""What a model is: the numbers that its families differ in."""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's scaling of rotary frequencies, with Hugging Face's names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder. `dtype` is the checkpoint's (f32, bf16, f16). `rope_scaling`: None, a linear factor, or Llama 3's.

    `attention_bias` covers q, k and v, and for families other than qwen2 the output projection too.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    dtype: str
    rope_scaling: Llama3Rope | float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


ENCODERS = ("bert",)
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len")


@dataclass(frozen=True)
class EncoderConfig:
    """A text encoder and what makes a vector of its last hidden states. `activation` is gelu, gelu_tanh or relu.

    `pooling` is one of POOLINGS: the mean of a sequence's own tokens, the first one, the largest of each number, or the
    sum over the square root of their count. `normalize` makes the vector one of length 1.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    activation: str
    dtype: str
    pooling: str = "mean"
    normalize: bool = False
