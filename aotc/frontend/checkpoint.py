"""Checkpoints of language models: a config, weights by name, and what turns text into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.models.config import FAMILIES, DecoderConfig, Llama3Rope


class TensorInfo(NamedTuple):
    """How a tensor is stored: element type, logical shape, and the name of its packing (None: dense)."""

    dtype: str
    shape: tuple[int, ...]
    packing: str | None = None


class WeightSource(Protocol):
    """Tensors by Hugging Face's names. Reading one maps it: a model is never in memory as a whole."""

    def names(self) -> Sequence[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str) -> np.ndarray:
        """The physical array: dense tensors in their dtype, packed ones as blocks of bytes."""
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


def open_checkpoint(source: str, *, revision: str | None = None, weights: str | None = None) -> Checkpoint:
    """Opens a .gguf file, a Hugging Face folder, or a hub id (`org/name`).

    `weights="random:SEED"` makes the weights from the config alone. Raises SourceError and UnsupportedError.
    """
    path = Path(source)
    if source.endswith(".gguf"):
        if not path.is_file():
            raise SourceError(f"{source} does not exist")
        from aotc.frontend.gguf import open_gguf

        checkpoint = open_gguf(path)
    elif path.is_file():
        raise UnsupportedError(f"{source} is no model that aotc reads: give a .gguf file, a Hugging Face folder or .onnx")
    else:
        from aotc.frontend.huggingface import find_in_hub, open_folder

        folder = path if path.is_dir() else find_in_hub(source, revision)
        checkpoint = open_folder(folder, random=weights is not None)
    if weights is None:
        return checkpoint
    from aotc.frontend.random_weights import random_checkpoint

    return random_checkpoint(checkpoint, weights)


def check_config(config: DecoderConfig) -> DecoderConfig:
    """The config, or SourceError where a number makes no model."""
    limits = {
        "vocab_size": 1 << 21, "hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 1 << 10,
        "num_attention_heads": 1 << 10, "num_key_value_heads": 1 << 10, "head_dim": 1 << 10,
        "max_position_embeddings": 1 << 27,
    }  # fmt: skip
    for name, most in limits.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise SourceError(f"the config has {name} = {value!r}, which is not between 1 and {most}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise SourceError("the config has attention heads that do not divide by its key-value heads")
    if config.head_dim % 2:
        raise SourceError(f"the config has head_dim = {config.head_dim}: rotary embeddings need an even one")
    if not (config.rms_norm_eps > 0 and config.rope_theta > 0):
        raise SourceError("the config has rms_norm_eps or rope_theta that is not positive")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise SourceError(f"the config has sliding_window = {config.sliding_window}")
    return config


def unknown_family(name: object) -> UnsupportedError:
    """The refusal of an architecture that no family covers."""
    return UnsupportedError(f"architecture {name!r} is not supported: aotc compiles {', '.join(FAMILIES)}")


__all__ = [
    "FAMILIES", "Checkpoint", "DecoderConfig", "Llama3Rope", "TensorInfo", "WeightSource", "check_config",
    "open_checkpoint", "unknown_family",
]  # fmt: skip
