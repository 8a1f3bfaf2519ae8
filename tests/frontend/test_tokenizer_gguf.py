"""The tokenizer built from a GGUF file's metadata encodes as the model's own does.

Two witnesses: llama.cpp, whose ids for a fixed set of texts are kept in tokenizer_llama_cpp.json (its package builds from
source, so it is asked when that file is rewritten, not in every run), and byte-level BPE spelled out below.
"""

import json
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.gguf import read_gguf
from aotc.frontend.tokenizer_gguf import tokenizer_from_metadata
from benchmarks.fetch_model import fetch
from tests.frontend.gguf_files import CONTROL, NORMAL, VOCAB, byte_letters, vocabulary

GOLDEN = Path(__file__).with_name("tokenizer_llama_cpp.json")
PRETOKENIZERS = ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"]
TEXTS = [
    "Hello, world!", "  two  spaces   three ", "tabs\tand\r\nlines\n\n\n  end \n", " " * 40 + "x", "\n" * 12, "x" * 70,
    "don't I'LL we've you'RE it'S o'clock", "1 22 333 4444 55555 3.14159 1,000,000 0x1F", "½ ² ٣ Ⅷ ४ 一",
    "\u00e9 e\u0301 ﬁ ß İ ſ K ñ", "日本語の文章。中文,한국어", "🙂👍🏽👩‍👩‍👧 🇩🇪 ☃️", "non\u00a0breaking\u3000wide\u2028line",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # ok\n", "a==b != c <= d -> e => f; $x^2 ~|y|",
    "https://example.org/a_b?c=d&e=%20#f", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|", "<<|im_end|>>", "\\n \\u0041 \"quoted\" 'single' `code`", "...!?!? --- ___ ***",
    "ไทย हिन्दी עברית العربية", "Ελληνικά Кириллица", "\x00\x01\x7f\ufeff\ufffd", "CamelCaseHTTPServer2Go",
    "the the the and and 1212",
]  # fmt: skip


@cache
def metadata() -> dict:
    return read_gguf(fetch()).metadata


@cache
def tokenizer(pre: str) -> tokenizers.Tokenizer:
    """SmolLM2's vocabulary, with words as `pre` splits them."""
    meta = metadata() | {"tokenizer.ggml.pre": pre}
    return tokenizers.Tokenizer.from_str(tokenizer_from_metadata(Path("m.gguf"), meta, 49152).json.decode())


def encode(pre: str, text: str) -> list[int]:
    return tokenizer(pre).encode(text, add_special_tokens=False).ids


def ask_llama_cpp(folder: Path) -> dict[str, list[list[int]]]:
    """llama.cpp's ids by pretokenizer and text. It does not normalise, which the tokenizer of Qwen 2 does."""
    gguf, llama_cpp = pytest.importorskip("gguf"), pytest.importorskip("llama_cpp")
    ids = {}
    for pre in PRETOKENIZERS:
        writer = gguf.GGUFWriter(str(folder / pre), "llama")
        for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"llama.{name}", metadata()[f"llama.{name}"])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(metadata()["tokenizer.ggml.tokens"])
        writer.add_token_types(metadata()["tokenizer.ggml.token_type"].tolist())
        writer.add_token_merges(metadata()["tokenizer.ggml.merges"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model = llama_cpp.Llama(str(folder / pre), vocab_only=True, verbose=False)
        texts = [unicodedata.normalize("NFC", t) if pre == "qwen2" else t for t in TEXTS]
        ids[pre] = [list(model.tokenize(t.encode(), add_bos=False, special=True)) for t in texts]
    return ids


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_ids_are_those_of_llama_cpp(pre, update_golden, tmp_path):
    if update_golden:
        ids = ask_llama_cpp(tmp_path)
        lines = [f"  {json.dumps(p)}: [\n    " + ",\n    ".join(map(json.dumps, ids[p])) + "\n  ]" for p in ids]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert [encode(pre, text) for text in TEXTS] == json.loads(GOLDEN.read_text())[pre]


# Byte-level BPE, spelled out

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
WORDS = {
    "smollm": [r"\p{N}", _GPT2], "gpt-2": [_GPT2], "llama-bpe": [_HEAD + r"\p{N}{1,3}" + _TAIL],
    "qwen2": [_HEAD + r"\p{N}" + _TAIL],
}  # fmt: skip
"""The patterns that cut a text into words, one after the other: of llama.cpp's src/llama-vocab.cpp."""


def cut(text: str, pattern: str) -> list[str]:
    """The matches of a pattern, and what lies between them."""
    parts, at = [], 0
    for match in regex.finditer(pattern, text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [p for p in (*parts, text[at:]) if p]


@cache
def tables() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    ids = {token: i for i, token in enumerate(metadata()["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata()["tokenizer.ggml.merges"])}
    return ids, ranks


def merged(word: str) -> list[str]:
    """The lowest-ranked pair of neighbours is merged, the leftmost first, until there is none."""
    _, ranks = tables()
    letters = byte_letters()
    symbols = [letters[b] for b in word.encode()]
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(zip(symbols, symbols[1:], strict=False)) if pair in ranks]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def spelled_out(pre: str, text: str) -> list[int]:
    ids, _ = tables()
    words = [unicodedata.normalize("NFC", text) if pre == "qwen2" else text]
    for pattern in WORDS[pre]:
        words = [part for word in words for part in cut(word, pattern)]
    whole = ids if pre == "llama-bpe" else {}
    found = []
    for word in words:
        token = "".join(byte_letters()[b] for b in word.encode())
        # The vocabulary lacks a few bytes that no text holds: they are lost.
        found += [whole[token]] if token in whole else [ids[s] for s in merged(word) if s in ids]
    return found


FRAGMENTS = [
    "the", " The", "  ", "\n", "\r\n", "\t", "don't", "'LL", "'s", "12345", "7", "²", "٣", "\u00e9", "e\u0301", "日本",
    "한글", "🙂", "\u200d", "\u00a0", "def f(x):\n    return x\n", "==", "->", "...", "a_b", "\\n", "$", "«x»", "’s", "ไทย",
]  # fmt: skip
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn", "Co"], max_codepoint=0x1FAFF)


def any_text():
    """Pieces of prose, code and numbers, with any characters between. Angle brackets are left to other tests."""
    pieces = st.lists(st.sampled_from(FRAGMENTS) | st.text(ASSIGNED, max_size=4), max_size=8)
    return pieces.map("".join).map(lambda t: t.replace("<", ""))


@pytest.mark.parametrize("pre", WORDS)
@given(text=any_text())
def test_ids_are_those_of_bpe_spelled_out(pre, text):
    assert encode(pre, text) == spelled_out(pre, text)


def has_bytes(letter: str) -> bool:
    """True where the vocabulary has the letter's bytes."""
    return all(byte_letters()[b] in tables()[0] for b in letter.encode())


@pytest.mark.parametrize("pre", PRETOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]).filter(has_bytes)))
def test_ids_decode_to_the_text(pre, text):
    want = tokenizer(pre).normalizer.normalize_str(text) if pre == "qwen2" else text
    assert tokenizer(pre).decode(encode(pre, text), skip_special_tokens=False) == want


# Fields of the metadata


def small(**changes):
    """Metadata of a small tokenizer. A change to None leaves a field out."""
    tokens, types, merges = vocabulary()
    meta = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": np.array(types, np.int32), "merges": merges,
            "bos_token_id": 266, "eos_token_id": 267, **changes}  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in meta.items() if v is not None}


def build(meta, vocab_size=VOCAB):
    files = tokenizer_from_metadata(Path("m.gguf"), meta, vocab_size)
    return tokenizers.Tokenizer.from_str(files.json.decode()), files.config


def test_tokens_that_are_no_text_are_found_in_it_and_unused_ones_never():
    made, config = build(small())
    ids = {token: i for i, token in enumerate(vocabulary()[0])}
    assert made.encode("<|im_start|>and<think>").ids == [ids["<|im_start|>"], ids["and"], ids["<think>"]]
    assert ids["[PAD0]"] not in made.encode("[PAD0]").ids
    assert made.decode([ids["<|im_start|>"], ids["and"], ids["<think>"]]) == "and<think>"  # a control token is no text
    assert config == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False, "add_eos_token": False}


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([266], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([266], [267])),
        ({"pre": "llama-bpe"}, ([266], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
    ],
)
def test_tokens_around_a_text(changes, around):
    made, config = build(small(**changes))
    before, after = around
    inner = made.encode("the", add_special_tokens=False).ids
    assert made.encode("the").ids == [*before, *inner, *after]
    assert (config["add_bos_token"], config["add_eos_token"]) == (bool(before), bool(after))


@pytest.mark.parametrize(
    ("pre", "digits", "word"),
    [
        ("gpt-2", ["1234", "5"], [*"zebra"]), ("smollm", [*"12345"], [*"zebra"]), ("qwen2", [*"12345"], [*"zebra"]),
        ("llama-bpe", ["123", "4", "5"], ["zebra"]), ("default", ["123", "4", "5"], [*"zebra"]),
    ],
)  # fmt: skip
def test_groups_of_digits_and_words_that_no_merges_make(pre, digits, word):
    """SmolLM2's vocabulary has neither: its numbers are digits, and merges make all its words."""
    tokens, types, merges = vocabulary()
    for at, token in zip((290, 291, 292), ("123", "1234", "zebra"), strict=True):
        tokens[at], types[at] = token, NORMAL
    meta = small(pre=pre, tokens=tokens, token_type=np.array(types), merges=[*merges, "12 3", "123 4"])
    made, _ = build(meta)
    assert made.encode("12345", add_special_tokens=False).tokens == digits
    assert made.encode("zebra", add_special_tokens=False).tokens == word


def replaced(values, at, value):
    return [value if i == at else v for i, v in enumerate(values)]


TOKENS, TYPES, MERGES = vocabulary()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "llama"}, UnsupportedError, "has a 'llama' tokenizer: aotc builds byte-level BPE"),
        ({"model": None}, UnsupportedError, "has a None tokenizer"),
        ({"pre": "tekken"}, UnsupportedError, "splits words by 'tekken': aotc knows smollm, gpt-2, "),
        ({"pre": 7}, UnsupportedError, "splits words by 7"),
        ({"tokens": None}, SourceError, "has no list of strings tokenizer.ggml.tokens"),
        ({"tokens": []}, SourceError, "has no list of strings tokenizer.ggml.tokens"),
        ({"tokens": TOKENS[:-1]}, SourceError, "has 300 types for 299 tokens"),
        ({"tokens": replaced(TOKENS, 5, TOKENS[6])}, SourceError, "its vocabulary has a token twice"),
        ({"token_type": None}, SourceError, "has no list of numbers"),
        ({"token_type": np.array(TYPES, np.float32)}, SourceError, "has no list of numbers"),
        ({"merges": [*MERGES, "t"]}, SourceError, "merge 't' is not of two tokens into a third"),
        ({"merges": [*MERGES, "the the"]}, SourceError, "merge 'the the' is not of two tokens"),
        ({"merges": [*MERGES, "a b c"]}, SourceError, "merge 'a b c' is not"),
        ({"eos_token_id": 300}, SourceError, "tokenizer.ggml.eos_token_id is 300, no token in use"),
        ({"eos_token_id": 299}, SourceError, "tokenizer.ggml.eos_token_id is 299, no token in use"),
        ({"bos_token_id": "one"}, SourceError, "tokenizer.ggml.bos_token_id is 'one'"),
        ({"add_bos_token": 1}, SourceError, "add_bos_token = 1, which is no bool"),
        ({"add_bos_token": True, "bos_token_id": None}, SourceError, "adds BOS to texts and has no"),
    ],
)
def test_malformed_fields_are_named(changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        build(small(**changes))
    assert "\n" not in str(caught.value)


def test_more_tokens_than_embeddings_are_refused():
    with pytest.raises(SourceError, match="has 300 tokens and embeddings for 299"):
        build(small(), vocab_size=299)
    assert TYPES.count(CONTROL) == 2
