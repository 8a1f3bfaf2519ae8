"""Tokens of a request as text: stop strings, and `min_tokens`, before which none counts."""

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import decoders, models

from aotc.runtime.detokenizer import Detokenizer, StopStrings
from aotc.runtime.llm import TextStream
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import TokenOutput
from aotc.runtime.tokenizer import Tokenizer


def stop_of(pieces, stops, free):
    """The oracle: (text before, stop string) of the first stop string that a piece after the first `free` completes."""
    free_end = len("".join(pieces[:free]))
    text = "".join(pieces)
    for end in range(free_end + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    free=st.integers(0, 8),
)
@example(pieces=["aba", "b"], stops=["abab"], free=1)
@example(pieces=["abab", "ab"], stops=["abab"], free=1)
@example(pieces=["aa", "a"], stops=["aa"], free=1)
def test_stop_strings_of_free_pieces_do_not_count(pieces, stops, free):
    machine, text, stopped_by = StopStrings(stops), "", None
    for n, piece in enumerate(pieces):
        shown, stopped_by = machine.push(piece, n >= free)
        text += shown
        if stopped_by:
            break
    expected, by = stop_of(pieces, stops, free)
    text += "" if stopped_by else machine.flush()
    assert stopped_by == by and text == expected


@pytest.fixture
def answer(byte_tokenizer):
    """answer(text, **params) -> (text, finish reason, tokens used) of a model that says `text` and nothing more."""

    def run(text, **fields):
        params = SamplingParams(max_tokens=len(text), **fields)
        stream, shown = TextStream(params, Detokenizer(byte_tokenizer)), ""
        ids = byte_tokenizer.encode(text)
        for n, token in enumerate(ids):
            last = n == len(ids) - 1
            chunk = stream.push(TokenOutput("x", token, (), "length" if last else None))
            shown += chunk.text
            if chunk.finish_reason:
                return shown, chunk.finish_reason, n + 1
        raise AssertionError

    return run


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (0, ("ab", "stop", 3)),
        (2, ("ab", "stop", 3)),  # the third token completes it
        (3, ("abxab", "stop", 6)),
        (6, ("abxabxab", "length", 8)),
    ],
)
def test_stop_strings_count_after_min_tokens(answer, least, expected):
    assert answer("abxabxab", stop=("x",), min_tokens=least) == expected


def test_a_stop_string_that_the_last_free_token_begins(answer):
    assert answer("12345", stop=("23",), min_tokens=2) == ("1", "stop", 3)
    assert answer("12345", stop=("23",), min_tokens=3) == ("12345", "length", 5)
    assert answer("11112", stop=("11",), min_tokens=3) == ("11", "stop", 4)
    assert answer("12345", stop=("45",), min_tokens=5) == ("12345", "length", 5)
    assert answer("12", stop=("12",), min_tokens=1, include_stop_str_in_output=True) == ("12", "stop", 2)


def test_bytes_of_tokens(byte_tokenizer, tmp_path):
    """All bytes that tokens add are those of the text, with byte-level and with SentencePiece's tokens."""
    text = "Grüße, 日本!"
    detokenizer = Detokenizer(byte_tokenizer)
    assert b"".join(map(detokenizer.token_bytes, byte_tokenizer.encode(text))) == text.encode()
    assert detokenizer.token_bytes(257) == b"<|im_end|>" and detokenizer.token_bytes(10**6) == b""
    vocab = {"<unk>": 0, "\u2581hello": 1, "\u2581": 2, "world": 3, **{f"<0x{b:02X}>": 4 + b for b in range(256)}}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    detokenizer = Detokenizer(Tokenizer(tmp_path / "tokenizer.json"))
    got = [detokenizer.token_bytes(t) for t in (1, 2, 3, 4 + 0xC3, 10**6)]
    assert got == [b" hello", b" ", b"world", b"\xc3", b""]
