"""Reads text encoders: BERT's family in a Hugging Face folder, and what sentence-transformers adds to one.

modules.json names the modules that follow the encoder, each in a folder of its own: Pooling, which makes a vector of the
last hidden states, and Normalize. A folder without modules.json is read as sentence-transformers reads it: the mean of
all tokens, not normalised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import WEIGHT_DTYPES, TensorInfo, WeightSource, is_real, is_whole, shown
from aotc.frontend.huggingface import (
    NoWeights,
    given,
    model_name,
    read_dtype,
    read_json,
    read_tokenizer,
    read_weights,
    refuse_foreign,
)
from aotc.frontend.random_weights import RandomWeights, seed_of
from aotc.frontend.safetensors import parse_json, read_bytes
from aotc.models.config import ENCODERS, EncoderConfig

_ARCHITECTURES = {"bert": ("BertModel", "BertForMaskedLM", "BertForPreTraining")}
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_POOLINGS = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}  # fmt: skip
_MOST = {
    "vocab_size": 1 << 21, "hidden_size": 1 << 14, "intermediate_size": 1 << 17, "num_hidden_layers": 1 << 8,
    "num_attention_heads": 1 << 10, "max_position_embeddings": 1 << 15, "type_vocab_size": 1 << 10,
}  # fmt: skip


@dataclass(frozen=True)
class EncoderCheckpoint:
    """A text encoder's files. `max_length` is how many tokens its makers let a text have."""

    name: str
    config: EncoderConfig
    weights: WeightSource
    tokenizer_json: bytes
    max_length: int


def is_encoder(folder: Path) -> bool:
    """Whether a folder's config.json names a family of encoders."""
    path = folder / "config.json"
    return path.is_file() and parse_json(read_bytes(path), str(path)).get("model_type") in ENCODERS


def open_encoder(folder: Path, *, random: bool = False) -> EncoderCheckpoint:
    """The checkpoint in a folder. With `random`, its weights are left out and need not be there.

    Raises SourceError for what is missing or malformed, UnsupportedError for what aotc does not compile.
    """
    where = str(folder / "config.json")
    raw = read_json(folder, "config.json")
    weights = NoWeights() if random else _Renamed(read_weights(folder))
    first = "embeddings.word_embeddings.weight"
    stored = weights.info(first).dtype if first in weights.names() else None
    pooling, normalize = _modules(folder)
    config = _config(raw, where, read_dtype(raw, where) if stored is None else stored, pooling, normalize)
    if not random:
        _check_weights(str(folder), config, weights)
    tokenizer = read_tokenizer(folder, random)
    if tokenizer is None:
        raise SourceError(f"{folder} has no tokenizer.json: save the model's tokenizer there with save_pretrained")
    _check_text(folder, tokenizer)
    return EncoderCheckpoint(model_name(folder), config, weights, tokenizer, _max_length(folder, config))


def random_encoder(checkpoint: EncoderCheckpoint, spec: str) -> EncoderCheckpoint:
    """The checkpoint with weights that follow from `spec`, "random:SEED", and its config alone.

    Raises UnsupportedError for another spec.
    """
    shapes, dtype = encoder_shapes(checkpoint.config), checkpoint.config.dtype
    return replace(checkpoint, weights=RandomWeights(shapes, dtype, seed_of(spec)))


class _Renamed:
    """Weights by the names of the bare encoder: heads' checkpoints prefix them, and old ones call norms' parameters gamma
    and beta."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights, self._stored = weights, {}
        names = weights.names()
        prefix = "bert." if any(n.startswith("bert.embeddings.") for n in names) else ""
        for name in names:
            if name.startswith(prefix):
                bare = name.removeprefix(prefix)
                bare = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", bare)
                self._stored[re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", bare)] = name

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        return self._weights.info(self._stored.get(name, name))

    def read(self, name: str) -> np.ndarray:
        return self._weights.read(self._stored.get(name, name))


def _config(raw: dict[str, Any], where: str, dtype: str | None, pooling: str, normalize: bool) -> EncoderConfig:
    family, architectures = raw.get("model_type"), raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if family not in _ARCHITECTURES or named not in (None, *_ARCHITECTURES[family]):
        raise UnsupportedError(
            f"{where}: architecture {shown(named or family)} is not supported: aotc compiles "
            f"{', '.join(n for names in _ARCHITECTURES.values() for n in names)} as text encoders"
        )
    refuse_foreign(raw, where)
    for name, usual in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        if given(raw, name, usual) != usual:
            raise UnsupportedError(f"{where} sets {name} to {shown(raw[name])}: aotc compiles {str(usual).lower()}")
    activation = given(raw, "hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{where} sets hidden_act to {shown(activation)}: aotc compiles {', '.join(_ACTIVATIONS)}"
        )
    sizes = {name: given(raw, name, 2 if name == "type_vocab_size" else None) for name in _MOST}
    for name, most in _MOST.items():
        if not is_whole(sizes[name], 1, most):
            raise SourceError(
                f"{where}: {name} is {shown(sizes[name])}, which is not a whole number between 1 and {most}"
            )
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise SourceError(
            f"{where}: hidden_size is {sizes['hidden_size']}, which is not a multiple of num_attention_heads"
        )
    eps = given(raw, "layer_norm_eps", 1e-12)
    if not is_real(eps, 0, 1):
        raise SourceError(f"{where}: layer_norm_eps is {shown(eps)}, which is not between 0 and 1")
    return EncoderConfig(
        family=family, **sizes, layer_norm_eps=eps, activation=_ACTIVATIONS[activation], dtype=dtype or "f32",
        pooling=pooling, normalize=normalize,
    )  # fmt: skip


def _modules(folder: Path) -> tuple[str, bool]:
    """(pooling, normalize) of what follows the encoder."""
    path = folder / "modules.json"
    if not path.is_file():
        return "mean", False
    modules = parse_json(b'{"modules":' + read_bytes(path) + b"}", str(path)).get("modules")
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise SourceError(f"{path} is no list of modules")
    kinds = [str(m.get("type")).rpartition(".")[2] for m in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedError(
            f"{path} has the modules {shown(', '.join(kinds))}: aotc compiles Transformer, Pooling and, after them, Normalize"
        )
    if modules[0].get("path"):
        raise UnsupportedError(
            f"{path} keeps the encoder in {shown(modules[0]['path'])}: give a folder with it at its top"
        )
    place = modules[1].get("path")
    if not isinstance(place, str) or not re.fullmatch(r"\w[\w.-]*", place):
        raise SourceError(f"{path}: {shown(place)} is no folder of it")
    return _pooling(folder / place), kinds[-1] == "Normalize"


def _pooling(folder: Path) -> str:
    path, raw = folder / "config.json", read_json(folder, "config.json")
    if isinstance(raw.get("pooling_mode"), str):  # in place of a flag for each mode
        chosen = [raw["pooling_mode"]]
    else:
        chosen = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value]
    modes = [_POOLINGS.get(name, name if name in _POOLINGS.values() else None) for name in chosen]
    if len(modes) != 1 or modes[0] is None:
        raise UnsupportedError(
            f"{path} sets {shown(', '.join(chosen) or 'no pooling mode')}: aotc compiles one of {', '.join(_POOLINGS)}"
        )
    return modes[0]


def _check_text(folder: Path, tokenizer: bytes) -> None:
    """Raises UnsupportedError where sentence-transformers changes texts before the tokenizer sees them."""
    name = "sentence_bert_config.json"
    if read_json(folder, name).get("do_lower_case") and not re.search(rb'"lowercase"\s*:\s*true', tokenizer):
        raise UnsupportedError(f"{folder / name} sets do_lower_case: let the normalizer of tokenizer.json do it")
    name = "config_sentence_transformers.json"
    prompt = read_json(folder, name).get("default_prompt_name")
    if prompt is not None:
        raise UnsupportedError(
            f"{folder / name} sets default_prompt_name: remove it, and put the prompt before your texts"
        )


def _max_length(folder: Path, config: EncoderConfig) -> int:
    """What sentence-transformers says, else the tokenizer's, but no more than there are positions."""
    most = config.max_position_embeddings
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        value = read_json(folder, name).get(key)
        if is_whole(value, 1, 1 << 62):
            return min(value, most)
    return most


def encoder_shapes(config: EncoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that an encoder of this config reads, by Hugging Face's name. Linear weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
    }
    linear = {
        **{f"attention.self.{n}": (hidden, hidden) for n in ("query", "key", "value")},
        "attention.output.dense": (hidden, hidden), "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for n in range(config.num_hidden_layers):
        layer = f"encoder.layer.{n}"
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{layer}.{name}.bias": shape[:1] for name, shape in linear.items()}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


_UNREAD = re.compile(r"pooler\.dense\.(weight|bias)|cls\..*|embeddings\.position_ids")  # heads, and what is computed


def _check_weights(where: str, config: EncoderConfig, weights: WeightSource) -> None:
    """Raises SourceError for a tensor that is missing or of another shape, UnsupportedError for one that is unknown."""
    shapes, stored = encoder_shapes(config), set(weights.names())
    for name, shape in shapes.items():
        if name not in stored:
            raise SourceError(f"{where} has no tensor {name}, which its config asks for")
        info = weights.info(name)
        if info.shape != shape:
            raise SourceError(f"{where}: tensor {name} has shape {info.shape}, and by the config {shape}")
        if info.dtype not in WEIGHT_DTYPES:
            raise UnsupportedError(f"{where}: tensor {name} is {info.dtype}: aotc reads {', '.join(WEIGHT_DTYPES)}")
    for name in sorted(stored - shapes.keys()):
        if not _UNREAD.fullmatch(name):
            raise UnsupportedError(f"{where} has tensor {shown(name)}, which {config.family} encoders do not have")
