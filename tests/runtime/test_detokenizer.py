"""Incremental text against the text of all tokens at once, and stop strings against a search of all text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from aotc.errors import UnsupportedError
from aotc.frontend.gguf import open_gguf
from aotc.runtime.detokenizer import Detokenizer, StopStrings
from aotc.runtime.tokenizer import Tokenizer

MERGED = [
    "Ġt",
    "he",
    "Ġthe",
    "é",
    "ðŁ",
    "ðŁĺ",
    "Ģ",
    "ä½",
    "ł",
    "å¥½",
    "âĢ",
    "Ļs",
    "ĊĊ",
]  # some cut characters


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path)


def byte_level(folder: Path) -> Tokenizer:
    """All 256 bytes, some longer tokens, special and plain added tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *MERGED]))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|é ł|>"])
    tokenizer.add_tokens(["plain token", "日本", "Ġ"])
    return save(tokenizer, folder)


def sentencepiece(folder: Path) -> Tokenizer:
    """Llama's decoder: spaces as U+2581, bytes as <0xNN>, the first space removed."""
    pieces = ["▁", "▁▁", "▁the", "a", "é", "日", ".", "▁a", "<s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return save(tokenizer, folder)


def words(folder: Path, decoder: Any) -> Tokenizer:
    pieces = ["hello", "##ing", "n't", ".", "▁the", "▁", "x</w>", "y", "[CLS]"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="y"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[CLS]"])
    return save(tokenizer, folder)


MAKE = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "wordpiece": lambda folder: words(folder, decoders.WordPiece()),
    "metaspace": lambda folder: words(folder, decoders.Metaspace()),
    "suffix": lambda folder: words(folder, decoders.BPEDecoder()),
    "none": lambda folder: words(folder, None),
}


@pytest.fixture(scope="module", params=MAKE)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return MAKE[request.param](tmp_path_factory.mktemp("tokenizer"))


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocab = tokenizer.backend.get_vocab()
    return [vocab[token] for token in tokens]


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    """Half of them among the first, which SentencePiece's bytes would outnumber; some unknown."""
    return st.integers(0, 8) | st.integers(0, tokenizer.vocab_size + 1)


@given(data=st.data())
def test_pieces_add_up_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(token_ids(tokenizer), max_size=40))
    for skip in (True, False):
        pieces = stream(tokenizer, ids, skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)


@given(data=st.data())
def test_what_was_pushed_is_final(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(token_ids(tokenizer), max_size=12))
    more = data.draw(st.lists(token_ids(tokenizer), max_size=6))
    pushed = "".join(stream(tokenizer, ids)[:-1])
    assert tokenizer.decode(ids + more).startswith(pushed)


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bytes"))


@given(data=st.binary(max_size=24))
@example(b"\xf0\x9f\x98\x80")
@example(b"\xf0\x9f\x98")
@example(b"\xed\xa0\x80\xe0\x80\xf4\x90\xc0\xaf")
def test_bytes_come_out_as_utf8(bytes_only: Tokenizer, data: bytes) -> None:
    alphabet = {byte: char for char, byte in _spelling(bytes_only).items()}
    pieces = stream(bytes_only, ids_of(bytes_only, *(alphabet[b] for b in data)))
    assert "".join(pieces) == data.decode(errors="replace")


def _spelling(tokenizer: Tokenizer) -> dict[str, int]:
    """The byte that each one-character token decodes to, found by asking the library's own encoder."""
    encoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {}
    for point in range(0x250):
        text = encoder.pre_tokenize_str(chr(point))[0][0]
        spelled |= dict(zip(text, chr(point).encode(), strict=True))
    rest = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(spelled)
    for char in rest:  # bytes that start longer characters or none at all
        code = ord(char)
        spelled[char] = code if code < 0x100 else -1
    return {char: byte for char, byte in spelled.items() if byte >= 0}


def test_a_character_is_held_until_it_is_whole(bytes_only: Tokenizer) -> None:
    ids = ids_of(bytes_only, "ðŁĺ", "Ģ", "ðŁ", "he", "ðŁ")
    assert stream(bytes_only, ids) == ["", "😀", "", "\ufffdhe", "", "\ufffd"]


def test_flush_starts_anew(bytes_only: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_only)
    half, rest = ids_of(bytes_only, "ðŁĺ", "Ģ")
    assert detokenizer.push(half) == "" and detokenizer.flush() == "\ufffd" and detokenizer.flush() == ""
    assert detokenizer.push(half) + detokenizer.push(rest) == "😀"


def test_the_cost_of_a_token_does_not_grow(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    decoded: list[int] = []
    plain = tokenizer.decode
    tokenizer.decode = lambda ids, *a, **k: (decoded.append(len(list(ids))), plain(ids, *a, **k))[1]
    stream(tokenizer, [2, 3] * 500)
    assert max(decoded) <= 4


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a b", "c")]),
    ],
)
def test_decoders_that_take_text_back_are_refused(tmp_path: Path, decoder: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot stream"):
        Detokenizer(words(tmp_path, decoder))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("smollm2") / "tokenizer.json"
    path.write_bytes(open_gguf(smollm2_gguf).tokenizer_json or b"")
    return Tokenizer(path)


def test_pieces_of_the_real_tokenizer_add_up(smollm2: Tokenizer) -> None:
    rng = np.random.default_rng(5)
    for length in rng.integers(1, 60, 300):
        ids = rng.integers(0, smollm2.vocab_size, length).tolist()
        for skip in (True, False):
            assert "".join(stream(smollm2, ids, skip)) == smollm2.decode(ids, skip)
    text = "Grüße aus 日本 — 👩‍👩‍👧 said:\n\n\tnaïve “quotes” ½ 𝒳"
    pieces = stream(smollm2, smollm2.encode(text))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


# --- stop strings ---


def search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Looks at every prefix of the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


LETTERS = st.text("ab", max_size=30)


@settings(max_examples=400)
@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.booleans(), st.data())
def test_stop_strings_cut_where_a_search_cuts(text: str, stops: list[str], include: bool, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    finder, shown, stopped_by = StopStrings(stops, include), "", None
    for n, piece in enumerate(pieces):
        emitted, stopped_by = finder.push(piece)
        shown += emitted
        so_far = "".join(pieces[: n + 1])
        if stopped_by is not None:
            break
        held = so_far[len(shown) :]
        assert so_far == shown + held and (held == "" or any(stop.startswith(held) for stop in stops))
    assert (shown + finder.flush(), stopped_by) == search(text, stops, include)


def test_held_text_is_the_possible_start_of_a_stop() -> None:
    stops = StopStrings(["</s>", "\n\nUser"])
    assert stops.push("one <") == ("one ", None)
    assert stops.push("/") == ("", None)
    assert stops.push("b> two\n") == ("</b> two", None)
    assert stops.push("\nUse") == ("", None)
    assert stops.push("r: hi") == ("", "\n\nUser")
    assert stops.flush() == ""


def test_the_longest_of_stops_that_end_together_counts() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")
    assert StopStrings(["b", "ab"], include_stop_str_in_output=True).push("xabc") == ("xab", "ab")


def test_without_stops_nothing_is_held() -> None:
    stops = StopStrings([])
    assert stops.push("text") == ("text", None) and stops.flush() == ""


def test_long_repetitive_stops_take_linear_time() -> None:
    stops = StopStrings(["a" * 1000 + "b", "a" * 999 + "c"])
    shown = "".join(stops.push("a" * 10)[0] for _ in range(2000)) + stops.flush()
    assert shown == "a" * 20_000
