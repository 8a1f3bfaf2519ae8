"""A tokenizer in its compact form is the one of the source."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from aotc.frontend.tokenizer_json import compact

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)


MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("\u00c3", "\u00a9")]


def bpe(*others):
    """With these merges besides the usual ones."""
    merges = [*MERGES, *others]
    letters = [*LETTERS, *sorted({part for merge in others for part in merge} - {*LETTERS})]
    vocab = {c: n for n, c in enumerate([*letters, *(a + b for a, b in merges)])}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "\U0001f642"])
    return made


def wordpiece():
    words = ["[UNK]", "zebra", "##s", "a", "\u00e9t\u00e9"]
    return tokenizers.Tokenizer(models.WordPiece({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))


@pytest.mark.parametrize("make", [bpe, wordpiece])
@pytest.mark.parametrize("form", [{"indent": 2}, {"ensure_ascii": True}, {"ensure_ascii": False}])
def test_it_is_the_same_tokenizer_in_fewer_bytes(make, form):
    made = make()
    source = json.dumps(json.loads(made.to_str()), **form).encode()
    short = compact(source)
    assert len(short) < len(source) and compact(short) == short
    assert tokenizers.Tokenizer.from_str(short.decode()).to_str() == made.to_str()
    tokens = list(json.loads(short)["model"]["vocab"])
    assert tokens == sorted(tokens, key=str.encode)


def test_merges_become_texts():
    merges = json.loads(compact(bpe().to_str().encode()))["model"]["merges"]
    assert merges == [f"{a} {b}" for a, b in MERGES]


@pytest.mark.parametrize("other", [("a b", "c"), ("c", " "), ("#version", "a"), ("#versions", "a")])
def test_merges_that_would_be_read_as_others_stay_pairs(other):
    made = bpe(other)
    short = compact(made.to_str().encode())
    assert json.loads(short)["model"]["merges"] == [[a, b] for a, b in [*MERGES, other]]
    assert tokenizers.Tokenizer.from_str(short.decode()).to_str() == made.to_str()


def test_merges_that_are_texts_already_stay():
    form = json.loads(compact(bpe().to_str().encode()))
    assert json.loads(compact(json.dumps(form, indent=1).encode())) == form


@pytest.mark.parametrize(
    "data",
    [
        b"no JSON", b"[]", b"{}", b"\xff", b'{"model": {"vocab": [["a", -1.25]]}}', b'{"model": {"vocab": {"\\ud800": 0}}}',
        b'{"added_tokens": ["\\ud800"], "model": {"vocab": {"a": 0}}}',
    ],
)  # fmt: skip
def test_what_it_does_not_know_stays_as_it_is(data):
    assert compact(data) == data
