"""Reads GGUF files (versions 2 and 3, little endian) over a memory map; format: ggml's docs/gguf.md.

Every count, length and offset is checked against the bytes that remain before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import Checkpoint, TensorInfo, check_config, unknown_family
from aotc.ir.packing import PACKINGS
from aotc.models.config import DecoderConfig

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPES = {0: ("f32", None), 1: ("f16", None), 30: ("bf16", None), 2: ("f32", "q4_0"), 3: ("f32", "q4_1"), 8: ("f32", "q8_0")}
_TYPE_NAMES = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
_ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2}
_MOST_KEYS, _MOST_TENSORS, _MOST_NAME, _MOST_DIMS = 1 << 16, 1 << 16, 1 << 16, 4


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: how it is stored, and its bytes from the file's start."""

    info: TensorInfo
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file: metadata, tensors by GGUF's names, and the map."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]
    data: memoryview


class _Cursor:
    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.pos = path, data, 0

    def fault(self, message: str) -> SourceError:
        return SourceError(f"{self.path} is damaged or no GGUF file: {message} (at byte {self.pos})")

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.pos:
            raise self.fault("it ends too early")
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def number(self, kind: str) -> Any:
        size = struct.calcsize("<" + kind)
        return struct.unpack("<" + kind, self.take(size))[0]

    def string(self, most: int = 1 << 24) -> str:
        length = self.number("Q")
        if length > most:
            raise self.fault(f"a string of {length} bytes")
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError:
            raise self.fault("a string that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fault(f"a value of unknown type {kind}")
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            if count * 8 > len(self.data) - self.pos:
                raise self.fault(f"an array of {count} strings")
            return [self.string() for _ in range(count)]
        if item not in _SCALARS:
            raise self.fault(f"an array of type {item}")
        dtype = np.dtype({"B": "u1", "b": "i1", "H": "<u2", "h": "<i2", "I": "<u4", "i": "<i4", "f": "<f4", "?": "?",
                          "Q": "<u8", "q": "<i8", "d": "<f8"}[_SCALARS[item]])  # fmt: skip
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def read_gguf(path: Path) -> GGUFFile:
    """Parses a file. Raises SourceError when it is malformed, UnsupportedError for a tensor type without a reader."""
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    cursor = _Cursor(path, data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise cursor.fault("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedError(f"{path} is GGUF version {version}: convert it with a current llama.cpp (version 3)")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > _MOST_TENSORS or key_count > _MOST_KEYS:
        raise cursor.fault(f"{tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string(_MOST_NAME)
        if key in metadata:
            raise cursor.fault(f"key {key} stands twice")
        metadata[key] = cursor.value(cursor.number("I"))
    tensors = _tensors(cursor, tensor_count, metadata)
    return GGUFFile(path, metadata, tensors, data)


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, Entry]:
    raw = []
    for _ in range(count):
        name, dims = cursor.string(_MOST_NAME), cursor.number("I")
        if not 1 <= dims <= _MOST_DIMS:
            raise cursor.fault(f"tensor {name} has {dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]  # GGUF lists the fastest first
        raw.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fault(f"alignment {alignment!r} is no power of two")
    start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, Entry] = {}
    for name, shape, kind, offset in raw:
        info, nbytes = _stored(cursor, name, shape, kind)
        if offset % alignment or start + offset + nbytes > len(cursor.data):
            raise cursor.fault(f"tensor {name} ends outside the file")
        if name in tensors:
            raise cursor.fault(f"tensor {name} stands twice")
        tensors[name] = Entry(info, start + offset, nbytes)
    spans = sorted((e.offset, e.offset + e.nbytes, n) for n, e in tensors.items())
    for (_, end, a), (begin, _, b) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise cursor.fault(f"tensors {a} and {b} overlap")
    return tensors


def _stored(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> tuple[TensorInfo, int]:
    if kind not in _TYPES:
        known = "F32, F16, BF16, Q8_0, Q4_0, Q4_1"
        raise UnsupportedError(f"{cursor.path}: tensor {name} has type {_TYPE_NAMES.get(kind, kind)}: aotc reads {known}")
    dtype, packing = _TYPES[kind]
    count = math.prod(shape)
    if min(shape) < 1 or count > 1 << 40:
        raise cursor.fault(f"tensor {name} has shape {shape}")
    if packing is None:
        return TensorInfo(dtype, shape), count * _ITEMSIZE[dtype]
    row = PACKINGS[packing]
    if shape[-1] % row.block:
        raise cursor.fault(f"tensor {name} has rows of {shape[-1]}, which do not divide into blocks of {row.block}")
    return TensorInfo(dtype, shape, packing), count // row.block * row.block_bytes


_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a tensor, or None for one that models do not read."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] in ("weight", "bias"):
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return None


class GGUFWeights:
    """Tensors under Hugging Face's names. llama.cpp interleaves the rows of q and k in llama models: undone here."""

    def __init__(self, file: GGUFFile, config: DecoderConfig, interleaved: bool) -> None:
        self._file, self._config, self._interleaved = file, config, interleaved
        self._entries = {hf: e for n, e in file.tensors.items() if (hf := hf_name(n)) is not None}

    def names(self) -> Sequence[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        if name not in self._entries:
            raise SourceError(f"{self._file.path} has no tensor for {name}")
        return self._entries[name].info

    def read(self, name: str) -> np.ndarray:
        info, entry = self.info(name), self._entries[name]
        raw = np.frombuffer(self._file.data[entry.offset : entry.offset + entry.nbytes], np.uint8)
        if info.packing is None:
            array = raw.view(_numpy(info.dtype)).reshape(info.shape)
        else:
            row = PACKINGS[info.packing]
            array = raw.reshape(*info.shape[:-1], info.shape[-1] // row.block, row.block_bytes)
        heads = {"q_proj": self._config.num_attention_heads, "k_proj": self._config.num_key_value_heads}
        part = name.split(".")[-2]
        return _deinterleave(array, heads[part]) if self._interleaved and part in heads else array


def _deinterleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows (head, pair, half) back to (head, half, pair)."""
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


def _numpy(dtype: str) -> np.dtype:
    from aotc.ir.dtypes import DTYPES

    return DTYPES[dtype].np


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file. Raises SourceError and UnsupportedError."""
    from aotc.frontend.tokenizer_gguf import tokenizer_from_metadata

    file = read_gguf(path)
    config = _config(file)
    weights = GGUFWeights(file, config, file.metadata["general.architecture"] == "llama")
    tokenizer = tokenizer_from_metadata(path, file.metadata)
    generation = {"eos_token_id": list(config.eos_token_ids), "bos_token_id": config.bos_token_id}
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        path.name.removesuffix(".gguf"), config, weights, tokenizer.json, tokenizer.config, template, generation
    )


def _config(file: GGUFFile) -> DecoderConfig:
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise unknown_family(architecture)

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{architecture}.{key}", default)
        if value is None:
            raise SourceError(f"{file.path} has no {architecture}.{key}")
        return value

    if meta.get(f"{architecture}.expert_count"):
        raise UnsupportedError(f"{file.path} is a mixture of experts, which aotc does not compile yet")
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedError(f"{file.path} scales rope by a tensor: compile the Hugging Face checkpoint instead")
    scaling = meta.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedError(f"{file.path} scales rope by {scaling}: aotc reads none and linear from GGUF")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    if not isinstance(heads, int) or heads < 1:
        raise SourceError(f"{file.path} has a head count for each layer, or none")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(f"{file.path} rotates a part of each head, which aotc does not compile")
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = dict.fromkeys(int(meta[f"tokenizer.ggml.{k}"]) for k in ends if f"tokenizer.ggml.{k}" in meta)
    window = meta.get(f"{architecture}.attention.sliding_window")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{file.path} has no token_embd.weight")
    return check_config(DecoderConfig(
        family=architecture, vocab_size=embedding.info.shape[0], hidden_size=hidden,
        intermediate_size=get("feed_forward_length"), num_hidden_layers=get("block_count"), num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads), head_dim=head_dim,
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")), rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=float(get("rope.scaling.factor")) if scaling == "linear" else None,
        max_position_embeddings=get("context_length"), tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors, mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors, sliding_window=window or None,
        dtype=_main_dtype(file), bos_token_id=meta.get("tokenizer.ggml.bos_token_id"), eos_token_ids=tuple(eos),
    ))  # fmt: skip


def _main_dtype(file: GGUFFile) -> str:
    """The dtype of most weights; quantised ones count as f32, which they are dequantised to."""
    size = {"f32": 0, "f16": 0, "bf16": 0}
    for entry in file.tensors.values():
        size[entry.info.dtype] += entry.nbytes
    return max(size, key=lambda d: size[d])
