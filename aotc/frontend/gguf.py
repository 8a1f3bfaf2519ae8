"""Reads GGUF files (versions 2 and 3, little endian) over a memory map; format: ggml's docs/gguf.md.

Every count, length and offset is checked against the bytes that remain before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import Checkpoint, TensorInfo, check_config, check_weights, shown, unknown_family
from aotc.ir.dtypes import DTYPES
from aotc.ir.packing import PACKINGS
from aotc.models.config import DecoderConfig, Llama3Rope
from aotc.models.rope import inverse_frequencies

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9
_TYPES = {
    0: ("f32", None), 1: ("f16", None), 30: ("bf16", None), 2: ("f32", "q4_0"), 3: ("f32", "q4_1"), 8: ("f32", "q8_0"),
}  # fmt: skip
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMS, _MOST_ALIGNMENT = 1 << 12, 1 << 16, 4, 1 << 20
_MOST_NAME, _MOST_STRING, _MOST_ITEMS, _MOST_ELEMENTS = 1 << 10, 1 << 24, 1 << 24, 1 << 40


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
    data: mmap.mmap

    def read(self, name: str) -> np.ndarray:
        """A tensor as it lies in the file: dense in its dtype, packed as u8 [..., blocks, bytes of a block]."""
        entry = self.tensors[name]
        info, raw = entry.info, np.frombuffer(self.data, np.uint8, entry.nbytes, entry.offset)
        if info.packing is None:
            return raw.view(DTYPES[info.dtype].np).reshape(info.shape)
        return raw.reshape(PACKINGS[info.packing].physical_shape(info.shape))


class _Cursor:
    """Takes values off the map, front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), 0

    def fault(self, message: str) -> SourceError:
        return SourceError(f"{self.path} is damaged or no GGUF file: {message} (at byte {self.pos})")

    def advance(self, count: int) -> int:
        """Moves on by `count` bytes; returns where they begin."""
        start = self.pos
        if count > self.size - start:
            raise self.fault("it ends too early")
        self.pos = start + count
        return start

    def number(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self.data, self.advance(kind.size))[0]

    def string(self, most: int = _MOST_STRING) -> str:
        length = self.number(_U64)
        if length > most:
            raise self.fault(f"a string of {length} bytes")
        start = self.advance(length)
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError:
            raise self.fault("a string that is not UTF-8") from None

    def value(self) -> Any:
        kind = self.number(_U32)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fault(f"a value of unknown type {kind}")
        return self.array()

    def array(self) -> list[str] | np.ndarray:
        """Strings, or numbers that stay in the map. Arrays of arrays, which no converter writes, are refused."""
        item, count = self.number(_U32), self.number(_U64)
        least = 8 if item == _STRING else _SCALARS[item].size if item in _SCALARS else 0
        if not least:
            raise self.fault(f"an array of type {item}")
        if count > min(_MOST_ITEMS, (self.size - self.pos) // least):
            raise self.fault(f"an array of {count} items")
        if item == _STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(_SCALARS[item].format)
        return np.frombuffer(self.data, dtype, count, self.advance(count * least)) if count else np.empty(0, dtype)


def read_gguf(path: Path) -> GGUFFile:
    """Parses a file. Raises SourceError when it is malformed, UnsupportedError for a tensor type without a reader."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise cursor.fault("it does not begin with GGUF")
    cursor.advance(4)
    version = cursor.number(_U32)
    if version not in (2, 3):
        kind = "big endian" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise UnsupportedError(f"{path} is {kind}: aotc reads little-endian GGUF of versions 2 and 3")
    tensor_count, key_count = cursor.number(_U64), cursor.number(_U64)
    if tensor_count > _MOST_TENSORS or key_count > _MOST_KEYS:
        raise cursor.fault(f"{tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string(_MOST_NAME)
        if key in metadata:
            raise cursor.fault(f"key {shown(key)} stands twice")
        metadata[key] = cursor.value()
    return GGUFFile(path, metadata, _tensors(cursor, tensor_count, metadata), data)


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, Entry]:
    raw = []
    for _ in range(count):
        name, dims = cursor.string(_MOST_NAME), cursor.number(_U32)
        if not 1 <= dims <= _MOST_DIMS:
            raise cursor.fault(f"tensor {shown(name)} has {dims} dimensions")
        shape = tuple(cursor.number(_U64) for _ in range(dims))[::-1]  # GGUF lists the fastest first
        raw.append((name, shape, cursor.number(_U32), cursor.number(_U64)))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fault(f"alignment {shown(alignment)} is no power of two")
    start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, Entry] = {}
    for name, shape, kind, offset in raw:
        info, nbytes = _stored(cursor, name, shape, kind)
        if offset % alignment:
            raise cursor.fault(f"tensor {shown(name)} is not aligned")
        if start + offset + nbytes > cursor.size:
            raise cursor.fault(f"tensor {shown(name)} ends outside the file")
        if name in tensors:
            raise cursor.fault(f"tensor {shown(name)} stands twice")
        tensors[name] = Entry(info, start + offset, nbytes)
    spans = sorted((e.offset, e.offset + e.nbytes, n) for n, e in tensors.items())
    for (_, end, a), (begin, _, b) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise cursor.fault(f"tensors {shown(a)} and {shown(b)} overlap")
    return tensors


def _stored(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> tuple[TensorInfo, int]:
    if kind not in _TYPES:
        known = "F32, F16, BF16, Q8_0, Q4_0, Q4_1"
        found = _OTHER_TYPES.get(kind, kind)
        raise UnsupportedError(f"{cursor.path}: tensor {shown(name)} has type {found}: aotc reads {known}")
    dtype, packing = _TYPES[kind]
    count = math.prod(shape)
    if min(shape) < 1 or count > _MOST_ELEMENTS:
        raise cursor.fault(f"tensor {shown(name)} has shape {shape}")
    if packing is None:
        return TensorInfo(dtype, shape), count * DTYPES[dtype].itemsize
    row = PACKINGS[packing]
    if shape[-1] % row.block:
        rows = f"rows of {shape[-1]}, which do not divide into blocks of {row.block}"
        raise cursor.fault(f"tensor {shown(name)} has {rows}")
    return TensorInfo(dtype, shape, packing), count // row.block * row.block_bytes


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
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
_ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; a name that stands for none of a decoder's weights stays as it is."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _OTHER_NAMES.get(name, name)


class GGUFWeights:
    """Tensors under Hugging Face's names. llama.cpp interleaves the rows of q and k in llama models: undone here."""

    def __init__(self, file: GGUFFile, config: DecoderConfig, interleaved: bool) -> None:
        self._file = file
        self._stored = {hf_name(n): n for n in file.tensors if n != _ROPE_FACTORS}
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._heads = heads if interleaved else {}

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        if name not in self._stored:
            raise SourceError(f"{self._file.path} has no tensor {name}")
        return self._file.tensors[self._stored[name]].info

    def read(self, name: str) -> np.ndarray:
        self.info(name)
        array = self._file.read(self._stored[name])
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return array
        # Rows (head, pair, half) become (head, half, pair); the blocks of packed weights lie along rows.
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)


class _Settings:
    """Typed reading of the keys below an architecture's name."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.path, self._values, self._prefix = file.path, file.metadata, architecture

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise SourceError(f"{self.path} has no {self._prefix}.{key}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise SourceError(f"{self.path} has {self._prefix}.{key} = {shown(value)}, which is no {kind.__name__}")
        return value

    def refuse(self, key: str, allowed: object) -> None:
        """Refuses a setting that changes the model, unless it has the value that changes nothing."""
        value = self._values.get(f"{self._prefix}.{key}", allowed)
        if value is not allowed and not (type(value) in (int, float, bool) and value == allowed):
            raise UnsupportedError(f"{self.path} sets {self._prefix}.{key}, which aotc does not compile")


_NEUTRAL = {
    "expert_count": 0, "attention.causal": True, "attention.scale": 0.0, "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "logit_scale": 0.0,
    "embedding_scale": 0.0, "residual_scale": 0.0, "attention.sliding_window_pattern": 0, "pooling_type": 0,
    "rope.scale_linear": 1.0,
}  # fmt: skip


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file. Raises SourceError and UnsupportedError."""
    from aotc.frontend.tokenizer_gguf import tokenizer_from_metadata

    file = read_gguf(path)
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ("llama", "qwen2", "qwen3"):
        raise unknown_family(architecture)
    kind, parts = meta.get("general.type", "model"), meta.get("split.count", 1)
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedError(f"{path} holds no model, but {shown(kind)}")
    if type(parts) is not int or parts not in (0, 1):
        raise UnsupportedError(f"{path} is one part of a split model: join them with llama-gguf-split --merge")
    config = _config(file, architecture)
    weights = GGUFWeights(file, config, interleaved=architecture == "llama")
    check_weights(str(path), config, weights)
    tokenizer = tokenizer_from_metadata(path, meta, config.vocab_size)
    template = meta.get("tokenizer.chat_template")
    generation: dict[str, Any] = {"eos_token_id": list(config.eos_token_ids)}
    if config.bos_token_id is not None:
        generation["bos_token_id"] = config.bos_token_id
    return Checkpoint(
        path.name.removesuffix(".gguf"), config, weights, tokenizer.json, tokenizer.config,
        template if isinstance(template, str) else None, generation,
    )  # fmt: skip


def _config(file: GGUFFile, architecture: str) -> DecoderConfig:
    settings = _Settings(file, architecture)
    for key, allowed in _NEUTRAL.items():
        settings.refuse(key, allowed)
    heads, hidden = settings.get("attention.head_count", int), settings.get("embedding_length", int)
    head_dim = settings.get("attention.key_length", int, hidden // heads if heads > 0 else 0)
    settings.refuse("attention.value_length", head_dim)
    settings.refuse("rope.dimension_count", head_dim)
    window = settings.get("attention.sliding_window", int, 0)
    if window and architecture != "llama":
        raise UnsupportedError(f"{file.path} sets {architecture}.attention.sliding_window, which aotc does not compile")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{file.path} has no token_embd.weight")
    names = file.tensors.keys()
    config = check_config(DecoderConfig(
        # llama.cpp has no architecture of Mistral's: its models are llama, and differ in the window alone.
        family="mistral" if window else architecture, vocab_size=embedding.info.shape[0], hidden_size=hidden,
        intermediate_size=settings.get("feed_forward_length", int), num_hidden_layers=settings.get("block_count", int),
        num_attention_heads=heads, num_key_value_heads=settings.get("attention.head_count_kv", int, heads),
        head_dim=head_dim, rms_norm_eps=settings.get("attention.layer_norm_rms_epsilon", float),
        rope_theta=settings.get("rope.freq_base", float, 10000.0), rope_scaling=_linear_rope(settings),
        max_position_embeddings=settings.get("context_length", int), tie_word_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names, mlp_bias="blk.0.ffn_up.bias" in names,
        qk_norm=architecture == "qwen3", sliding_window=window or None, dtype=_main_dtype(file),
        bos_token_id=_token_id(file, "bos"), eos_token_ids=_end_ids(file),
    ), str(file.path))  # fmt: skip
    if _ROPE_FACTORS not in names:
        return config
    if config.rope_scaling is not None:
        raise UnsupportedError(f"{file.path} scales rope twice, by a factor and by tensor {_ROPE_FACTORS}")
    original = settings.get("rope.scaling.original_context_length", int, 8192)
    return check_config(replace(config, rope_scaling=_llama3_rope(file, config, original)), str(file.path))


def _linear_rope(settings: _Settings) -> float | None:
    scaling = settings.get("rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedError(f"{settings.path} scales rope by {shown(scaling)}: aotc compiles linear and Llama 3's")
    factor = settings.get("rope.scaling.factor", float, 1.0)
    return factor if scaling == "linear" and factor != 1.0 else None


def _llama3_rope(file: GGUFFile, config: DecoderConfig, original: int) -> Llama3Rope | None:
    """The scaling that gives the divisors [head_dim / 2] in the file. Converters do not keep its four numbers."""
    info = file.tensors[_ROPE_FACTORS].info
    if info != TensorInfo("f32", (config.head_dim // 2,)):
        raise SourceError(f"{file.path} has {_ROPE_FACTORS} of shape {info.shape} for heads of {config.head_dim}")
    factors = file.read(_ROPE_FACTORS)
    if np.all(factors == 1):
        return None
    plain = inverse_frequencies(config)
    for length in dict.fromkeys((original, 8192)):
        # 1 and 4 are those of every model of Llama 3.1 to 3.3.
        rope = Llama3Rope(float(factors.max()), 1.0, 4.0, length)
        if length > 0 and np.isfinite(rope.factor) and rope.factor > 1:
            scaled = inverse_frequencies(replace(config, rope_scaling=rope))
            if np.allclose(plain / scaled, factors, rtol=1e-4, atol=0):
                return rope
    raise UnsupportedError(f"{file.path} scales rope by a tensor, and not as Llama 3: give the Hugging Face checkpoint")


def _token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and type(value) is not int:
        raise SourceError(f"{file.path} has tokenizer.ggml.{name}_token_id = {shown(value)}")
    return value


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ends of text, of a turn, and of a message (a call of a tool), each once."""
    ids = (_token_id(file, name) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _main_dtype(file: GGUFFile) -> str:
    """The dtype of most weights; quantised ones count as f32, which they are dequantised to."""
    size = {"f32": 0, "f16": 0, "bf16": 0}
    for entry in file.tensors.values():
        size[entry.info.dtype] += entry.nbytes
    return max(size, key=lambda d: size[d])
