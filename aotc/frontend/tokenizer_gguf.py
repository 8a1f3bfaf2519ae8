"""Builds a `tokenizer.json` from the metadata of a GGUF file: byte-level BPE, encoding as the source did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import shown

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _splits(*patterns: str) -> list[dict[str, Any]]:
    steps = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return [*steps, {**_BYTES, "use_regex": False}]


@dataclass(frozen=True)
class Pretokenizer:
    """How text falls into words before merging. With `whole_words`, a word of the vocabulary skips the merges."""

    steps: list[dict[str, Any]]
    normalizer: dict[str, str] | None = None
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = Pretokenizer([{**_BYTES, "use_regex": True}])
_LLAMA3 = Pretokenizer(_splits(_WORDS + r"\p{N}{1,3}" + _REST), whole_words=True, adds_bos=True)

PRETOKENIZERS = {
    # By tokenizer.ggml.pre, as llama.cpp's src/llama-vocab.cpp and the models' own tokenizer.json have them.
    "smollm": Pretokenizer([{"type": "Digits", "individual_digits": True}, *_GPT2.steps]),
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Pretokenizer(_splits(_WORDS + r"\p{N}" + _REST), {"type": "NFC"}),
    # What llama.cpp does with files whose converter did not know the model's words.
    "default": Pretokenizer(_splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """`tokenizer.json` and the fields of `tokenizer_config.json` that aotc reads."""

    json: bytes
    config: dict[str, Any]


def tokenizer_from_metadata(path: Path, meta: dict[str, Any], vocab_size: int) -> TokenizerFiles:
    """Raises UnsupportedError for other kinds of tokenizers, SourceError for missing or malformed fields."""
    model = meta.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model != "gpt2":
        raise UnsupportedError(f"{path} has a {shown(model)} tokenizer: aotc builds byte-level BPE (gpt2) from GGUF")
    pre = meta.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRETOKENIZERS:
        raise UnsupportedError(f"{path} splits words by {shown(pre)}: aotc knows {', '.join(PRETOKENIZERS)}")
    tokens, types = _vocabulary(path, meta, vocab_size)
    ids = _token_ids(path, meta, types)
    adds = _added_around(path, meta, ids, PRETOKENIZERS[pre])
    document = {
        "version": "1.0", "truncation": None, "padding": None, **_words(path, meta, PRETOKENIZERS[pre], tokens, types),
        "post_processor": _post_processor(tokens, ids, adds), "decoder": {**_BYTES, "use_regex": True},
    }  # fmt: skip
    named = {f"{name}_token": tokens[ids[name]] if name in ids else None for name in ("bos", "eos")}
    config = {**named, **{f"add_{name}_token": name in adds for name in ("bos", "eos")}}
    return TokenizerFiles(json.dumps(document, ensure_ascii=False).encode(), config)


def _words(path: Path, meta: dict[str, Any], pre: Pretokenizer, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The parts of the document that turn text into ids."""
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == _CONTROL}
        for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    # Unused tokens fill ids that the source's vocabulary left free: no text means them.
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    return {
        "added_tokens": added, "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre.whole_words,
            "vocab": vocabulary, "merges": _merges(path, meta, vocabulary),
        },
    }  # fmt: skip


def _strings(path: Path, meta: dict[str, Any], name: str) -> list[str]:
    value = meta.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise SourceError(f"{path} has no list of strings tokenizer.ggml.{name}")
    return value


def _vocabulary(path: Path, meta: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens and their types, by id."""
    tokens, types = _strings(path, meta, "tokens"), meta.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu":
        raise SourceError(f"{path} has no list of numbers tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise SourceError(f"{path} is damaged: it has {len(types)} types for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise SourceError(f"{path} is damaged: its vocabulary has a token twice")
    if len(tokens) > vocab_size:
        raise SourceError(f"{path} is damaged: it has {len(tokens)} tokens and embeddings for {vocab_size}")
    return tokens, types.tolist()


def _merges(path: Path, meta: dict[str, Any], vocabulary: dict[str, int]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in _strings(path, meta, "merges")]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise SourceError(f"{path} is damaged: merge {shown(' '.join(pair))} is not of two tokens into a third")
    return pairs


def _token_ids(path: Path, meta: dict[str, Any], types: list[int]) -> dict[str, int]:
    """Ids of the tokens that begin and end things, where the file has them."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom"):
        at = meta.get(f"tokenizer.ggml.{name}_token_id")
        if at is None:
            continue
        if not (type(at) is int and 0 <= at < len(types) and types[at] != _UNUSED):
            raise SourceError(f"{path} is damaged: tokenizer.ggml.{name}_token_id is {shown(at)}, no token in use")
        ids[name] = at
    return ids


def _added_around(path: Path, meta: dict[str, Any], ids: dict[str, int], pre: Pretokenizer) -> list[str]:
    """Which of BOS and EOS stand around a text. Llama 3's files say nothing of BOS and mean yes."""
    names = []
    for name, default in (("bos", pre.adds_bos), ("eos", False)):
        adds = meta.get(f"tokenizer.ggml.add_{name}_token", default)
        if type(adds) is not bool:
            raise SourceError(f"{path} has tokenizer.ggml.add_{name}_token = {shown(adds)}, which is no bool")
        if adds:
            if name not in ids:
                raise SourceError(f"{path} adds {name.upper()} to texts and has no tokenizer.ggml.{name}_token_id")
            names.append(name)
    return names


def _post_processor(tokens: list[str], ids: dict[str, int], adds: list[str]) -> dict[str, Any]:
    offsets = {**_BYTES, "use_regex": True}
    if not adds:
        return offsets
    texts = {name: tokens[ids[name]] for name in adds}
    around = {name: [{"SpecialToken": {"id": text, "type_id": 0}}] for name, text in texts.items()}
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing", "single": [*around.get("bos", []), first, *around.get("eos", [])],
        "pair": [first, second],
        "special_tokens": {text: {"id": text, "ids": [ids[name]], "tokens": [text]} for name, text in texts.items()},
    }  # fmt: skip
    return {"type": "Sequence", "processors": [offsets, template]}
