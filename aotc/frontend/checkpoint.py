"""Checkpoints of language models: a config, weights by name, and what turns text into tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.models.config import FAMILIES, DecoderConfig, Llama3Rope

WEIGHT_DTYPES = ("f32", "bf16", "f16")


class TensorInfo(NamedTuple):
    """How a tensor is stored: element type, logical shape, and the name of its packing (None: dense)."""

    dtype: str
    shape: tuple[int, ...]
    packing: str | None = None


class WeightSource(Protocol):
    """Tensors by Hugging Face's names. Reading one maps it: a model is never in memory as a whole."""

    def names(self) -> Sequence[str]: ...

    def info(self, name: str) -> TensorInfo:
        """Raises SourceError where there is no such tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The physical array: dense tensors in their dtype, packed ones as u8 [..., blocks, bytes of a block]."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A language model's files. `generation_config` is Hugging Face's dictionary."""

    name: str
    config: DecoderConfig
    weights: WeightSource
    tokenizer_json: bytes | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)


FILES = (".gguf", ".safetensors", ".bin", ".onnx", ".pt", ".pth", ".json")
"""How the names of files end that a user may mean, and no hub id's."""


def open_checkpoint(source: str, *, revision: str | None = None, weights: str | None = None) -> Checkpoint:
    """Opens a .gguf file, a Hugging Face folder, or a hub id (`org/name`).

    `weights="random:SEED"` makes the weights from the config alone. Raises SourceError and UnsupportedError.
    """
    path = Path(source)
    if not path.exists() and path.suffix in FILES:  # a hub id may look like a path, and a model's name has dots
        raise SourceError(f"there is no file {source}: check the path")
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedError(f"{source} is no model that aotc reads: give a .gguf file or a Hugging Face folder")
        from aotc.frontend.gguf import open_gguf

        checkpoint = open_gguf(path)
    else:
        from aotc.frontend.huggingface import find_in_hub, open_folder

        folder = path if path.is_dir() else find_in_hub(source, revision, weights=weights is None)
        checkpoint = open_folder(folder, random=weights is not None)
    if weights is None:
        return checkpoint
    from aotc.frontend.random_weights import random_checkpoint

    return random_checkpoint(checkpoint, weights)


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Generation defaults as the runtime reads them: Hugging Face's fields, with every EOS id of the checkpoint, and
    the texts of BOS and EOS that chat templates name."""
    known: dict[str, Any] = {k: v for k, v in checkpoint.generation_config.items() if isinstance(v, int | float | list)}
    if checkpoint.config.eos_token_ids:
        known["eos_token_id"] = list(checkpoint.config.eos_token_ids)
    if checkpoint.config.bos_token_id is not None:
        known["bos_token_id"] = checkpoint.config.bos_token_id
    for name in ("bos_token", "eos_token"):
        token = checkpoint.tokenizer_config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            known[name] = text
    return known


_MOST = {
    "vocab_size": 1 << 21, "hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10, "num_key_value_heads": 1 << 10, "head_dim": 1 << 10,
    "max_position_embeddings": 1 << 27,
}  # fmt: skip


def check_config(config: DecoderConfig, where: str = "the config") -> DecoderConfig:
    """The config, or SourceError where a number makes no model."""

    def fault(name: str, wanted: str) -> SourceError:
        return SourceError(f"{where}: {name} is {shown(getattr(config, name))}, which is not {wanted}")

    if config.family not in FAMILIES:
        raise unknown_family(config.family)
    if config.dtype not in WEIGHT_DTYPES:
        raise fault("dtype", f"one of {', '.join(WEIGHT_DTYPES)}")
    for name, most in _MOST.items():
        if not is_whole(getattr(config, name), 1, most):
            raise fault(name, f"a whole number between 1 and {most}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise fault("num_attention_heads", f"a multiple of num_key_value_heads ({config.num_key_value_heads})")
    if config.head_dim % 2:
        raise fault("head_dim", "even, as rotary embeddings need it")
    if not is_real(config.rms_norm_eps, 0, 1):
        raise fault("rms_norm_eps", "between 0 and 1")
    if not is_real(config.rope_theta, 1, 1e12):
        raise fault("rope_theta", "between 1 and 1e12")
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qk_norm"):
        if type(getattr(config, name)) is not bool:
            raise fault(name, "true or false")
    if config.sliding_window is not None and not is_whole(config.sliding_window, 1, 1 << 27):
        raise fault("sliding_window", "a positive whole number")
    for name, ids in (("bos_token_id", (config.bos_token_id,)), ("eos_token_ids", config.eos_token_ids)):
        if not all(is_whole(i, 0, config.vocab_size - 1) or (i is None and name == "bos_token_id") for i in ids):
            raise fault(name, f"below the vocabulary's size ({config.vocab_size})")
    _check_rope(config.rope_scaling, where)
    return config


def _check_rope(scaling: Llama3Rope | float | None, where: str) -> None:
    if scaling is None:
        return
    factor = scaling.factor if isinstance(scaling, Llama3Rope) else scaling
    if not is_real(factor, 0, 1e6):
        raise SourceError(f"{where}: rope is scaled by {shown(factor)}, which is not between 0 and 1e6")
    if isinstance(scaling, Llama3Rope):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if not (is_real(low, 0, 1e6) and is_real(high, 0, 1e6) and low < high):
            raise SourceError(f"{where}: rope has low_freq_factor {shown(low)} and high_freq_factor {shown(high)}")
        if not is_whole(scaling.original_max_position_embeddings, 1, 1 << 27):
            length = shown(scaling.original_max_position_embeddings)
            raise SourceError(f"{where}: rope has original_max_position_embeddings {length}")


def is_whole(value: object, least: int, most: int) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most


def is_real(value: object, above: float, most: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and above < value <= most  # type: ignore[arg-type,operator]


def weight_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that a model of this config reads, by Hugging Face's name. Linear weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    biased = {name for name in linear if (config.mlp_bias if name.startswith("mlp.") else config.attention_bias)}
    if config.family == "qwen2":
        biased.discard("self_attn.o_proj")
    layer = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.bias": linear[name][:1] for name in linear if name in biased}
    layer |= {f"{name}.weight": (size,) for name, size in norms.items()}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for n in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


_RECOMPUTED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


def check_weights(where: str, config: DecoderConfig, weights: WeightSource) -> None:
    """Raises SourceError for a tensor that is missing or has another shape or dtype than the config says.

    A tensor that the model does not read is refused with UnsupportedError: leaving it out would change the answers.
    """
    shapes, stored = weight_shapes(config), set(weights.names())
    for name, shape in shapes.items():
        if name not in stored:
            raise SourceError(f"{where} has no tensor {name}, which its config asks for")
        info = weights.info(name)
        if info.shape != shape:
            raise SourceError(f"{where}: tensor {name} has shape {info.shape}, and by the config {shape}")
        if info.dtype not in WEIGHT_DTYPES:
            raise UnsupportedError(f"{where}: tensor {name} is {info.dtype}: aotc reads {', '.join(WEIGHT_DTYPES)}")
    for name in sorted(stored - shapes.keys()):
        if name == "lm_head.weight" or _RECOMPUTED.fullmatch(name):  # tied, and computed from the config
            continue
        raise UnsupportedError(f"{where} has tensor {shown(name)}, which {config.family} models do not have")


def unknown_family(name: object) -> UnsupportedError:
    """The refusal of an architecture that no family covers."""
    return UnsupportedError(f"architecture {shown(name)} is not supported: aotc compiles {', '.join(FAMILIES)}")


def shown(value: object) -> str:
    """A value from a file as a message may hold it: one short line, whatever the file says."""
    text = ascii(value[:100] if isinstance(value, str | list) else value)
    return text if len(text) <= 100 else text[:97] + "..."


__all__ = [
    "FAMILIES", "Checkpoint", "DecoderConfig", "Llama3Rope", "TensorInfo", "WeightSource", "check_config",
    "check_weights", "generation_config", "is_real", "is_whole", "open_checkpoint", "shown",
    "unknown_family", "weight_shapes",
]  # fmt: skip
