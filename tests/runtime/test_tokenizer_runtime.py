"""The tokenizer of an artifact: text in, ids out, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from aotc.errors import ArtifactError, RequestError
from aotc.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level, with a begin token that the file adds, and training settings that must not act."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens(["added"])
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path, {"eos_token_id": [257, 258], "bos_token_id": 256})


def test_text_comes_back_uncut_and_unpadded(tokenizer: Tokenizer) -> None:
    text = "Grüße, 日本!"
    ids = tokenizer.encode(text)
    assert len(ids) == 1 + len(text.encode()) and ids[0] == 256
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.decode([10**6, *ids]) == text
    assert tokenizer.encode("") == [256] and tokenizer.decode([]) == ""


def test_special_tokens_are_known_by_id_and_text(tokenizer: Tokenizer, path: Path) -> None:
    assert tokenizer.eos_token_ids == (257, 258) and tokenizer.eos_token == "</s>"
    assert tokenizer.bos_token_id == 256 and tokenizer.bos_token == "<s>"
    assert tokenizer.special_ids == {256, 257, 258} and tokenizer.vocab_size == 260
    assert Tokenizer(path, {"eos_token_id": 258}).eos_token == "<|im_end|>"
    named = Tokenizer(path, {"eos_token_id": [257], "eos_token": {"content": "<|im_end|>"}, "bos_token": None})
    assert (named.eos_token, named.bos_token) == ("<|im_end|>", "")
    bare = Tokenizer(path)
    assert (bare.eos_token_ids, bare.eos_token, bare.bos_token_id, bare.bos_token) == ((), "", None, "")


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "x" * 11, "é" * 6, b"bytes", None])
def test_text_that_is_no_prompt_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="^text "):
        tokenizer.encode(text, max_bytes=10)


def test_the_cap_counts_bytes(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("é" * 5, max_bytes=10)) == 11
    assert len(tokenizer.encode("x" * 10, max_bytes=10)) == 11


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5]])
def test_what_cannot_be_an_id_is_refused(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(RequestError, match="token ids must be integers"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("config", [{"eos_token_id": 260}, {"eos_token_id": ["x"]}, {"bos_token_id": -1}])
def test_configs_that_name_unknown_tokens_are_refused(path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="names token id"):
        Tokenizer(path, config)


@pytest.mark.parametrize("content", ["", "{}", "[" * 10_000, json.dumps({"model": {"type": "Evil"}})])
def test_files_that_hold_no_tokenizer_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(path)
    with pytest.raises(ArtifactError, match="not a tokenizer"):
        Tokenizer(tmp_path / "absent.json")
