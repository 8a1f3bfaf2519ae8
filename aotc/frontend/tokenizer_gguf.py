"""Builds a `tokenizer.json` from the metadata of a GGUF file: byte-level BPE, encoding as the source did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotc.errors import SourceError, UnsupportedError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_GPT2 = [{**_BYTES, "use_regex": True}]
_PRETOKENIZERS: dict[str, tuple[list[dict[str, Any]], dict[str, str] | None, bool]] = {
    # name of tokenizer.ggml.pre: (steps, normaliser, whether whole words skip the merges)
    "smollm": ([{"type": "Digits", "individual_digits": True}, *_GPT2], None, False),
    "gpt-2": (_GPT2, None, False),
    "default": (_GPT2, None, False),
    "llama-bpe": (_split(_LETTERS + r"\p{N}{1,3}" + _REST), None, True),
    "llama3": (_split(_LETTERS + r"\p{N}{1,3}" + _REST), None, True),
    "qwen2": (_split(_LETTERS + r"\p{N}" + _REST), {"type": "NFC"}, False),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """`tokenizer.json` and the fields of `tokenizer_config.json` that aotc reads."""

    json: bytes
    config: dict[str, Any]


def tokenizer_from_metadata(path: Path, meta: dict[str, Any]) -> TokenizerFiles:
    """Raises UnsupportedError for other kinds of tokenizers, SourceError for missing or malformed fields."""
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedError(f"{path} has a {model!r} tokenizer: aotc builds byte-level BPE (gpt2) from GGUF")
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _PRETOKENIZERS:
        raise UnsupportedError(f"{path} splits words by {pre!r}: aotc knows {', '.join(_PRETOKENIZERS)}")
    tokens, types, merges = (_list(path, meta, f"tokenizer.ggml.{k}") for k in ("tokens", "token_type", "merges"))
    if len(tokens) != len(types) or len(set(tokens)) != len(tokens):
        raise SourceError(f"{path} is damaged: its vocabulary has {len(types)} types for {len(tokens)} tokens, or repeats")
    steps, normaliser, whole_words = _PRETOKENIZERS[pre]
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == _CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normaliser,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": _post_processor(meta, tokens),
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": whole_words,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [_pair(path, m) for m in merges],
        },
    }  # fmt: skip
    return TokenizerFiles(json.dumps(document, ensure_ascii=False).encode(), _config(meta, tokens))


def _pair(path: Path, merge: Any) -> list[str]:
    parts = str(merge).split(" ")
    if len(parts) != 2:
        raise SourceError(f"{path} is damaged: merge {merge!r}")
    return parts


def _list(path: Path, meta: dict[str, Any], key: str) -> list[Any]:
    value = meta.get(key)
    if value is None or isinstance(value, str | int | float | bool):
        raise SourceError(f"{path} has no {key}")
    return list(value) if isinstance(value, list) else value.tolist()


def _token(meta: dict[str, Any], tokens: list[str], name: str) -> str | None:
    at = meta.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[at] if isinstance(at, int) and 0 <= at < len(tokens) else None


def _config(meta: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    named = {f"{n}_token": _token(meta, tokens, n) for n in ("bos", "eos")}
    return {**named, "add_bos_token": _adds(meta, "bos"), "add_eos_token": _adds(meta, "eos")}


def _adds(meta: dict[str, Any], name: str) -> bool:
    """Llama 3's files say nothing of BOS and mean yes; others without a word mean no."""
    default = name == "bos" and meta.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    return bool(meta.get(f"tokenizer.ggml.add_{name}_token", default))


def _post_processor(meta: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Adds BOS and EOS around a text where the file says so."""
    around = {n: _token(meta, tokens, n) for n in ("bos", "eos") if _adds(meta, n)}
    if not any(around.values()):
        return {**_BYTES, "use_regex": True}
    sequence: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, token in around.items():
        if token is None:
            continue
        special[token] = {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        item = {"SpecialToken": {"id": token, "type_id": 0}}
        sequence = [item, *sequence] if name == "bos" else [*sequence, item]
    template = {"type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special}
    return {"type": "Sequence", "processors": [{**_BYTES, "use_regex": True}, template]}
