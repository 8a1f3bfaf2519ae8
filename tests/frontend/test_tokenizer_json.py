"""A tokenizer in its compact form is the one of the source."""

import json
import random
from collections import Counter

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from aotc.frontend import tokenizer_json
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


def all_pairs(seed):
    """A vocabulary over three letters, and every pair of tokens that makes a token, in an order that no training gives."""
    draw = random.Random(seed)
    tokens = {"a", "b", "c", "d"}
    while len(tokens) < 40:
        tokens.add("".join(draw.choices(sorted(tokens), k=2))[:9])
    pairs = [(t[:n], t[n:]) for t in sorted(tokens) for n in range(1, len(t)) if t[:n] in tokens and t[n:] in tokens]
    draw.shuffle(pairs)
    return tokenizers.Tokenizer(models.BPE({t: n for n, t in enumerate(sorted(tokens))}, pairs)), draw


@pytest.mark.parametrize("seed", range(40))
def test_without_merges_that_never_happen_texts_have_the_same_ids(seed):
    """Held against the library on texts that the compiler does not look at."""
    made, draw = all_pairs(seed)
    short = compact(made.to_str().encode())
    before, after = (json.loads(data)["model"]["merges"] for data in (made.to_str(), short))
    assert len(after) < len(before) and compact(short) == short
    kept = [m.split(" ") for m in after]
    assert kept == [m for m in before if m in kept], "in the order of their ranks"
    read = tokenizers.Tokenizer.from_str(short.decode())
    texts = ["".join(draw.choices("abcdx", weights=[5, 4, 3, 2, 1], k=draw.randint(1, 60))) for _ in range(600)]
    assert [e.ids for e in made.encode_batch(texts)] == [e.ids for e in read.encode_batch(texts)]
    ways = Counter("".join(m) for m in before)
    for n, pair in enumerate(kept):
        if ways["".join(pair)] > 1:
            form = json.loads(short)
            del form["model"]["merges"][n]
            fewer = tokenizers.Tokenizer.from_str(json.dumps(form))
            assert fewer.encode("".join(pair)).ids != read.encode("".join(pair)).ids, "of several, the one that happens"


@pytest.mark.parametrize(
    "setting",
    [
        {"dropout": 0.1}, {"unk_token": "a"}, {"continuing_subword_prefix": "b"}, {"end_of_word_suffix": "c"},
        {"byte_fallback": True},
    ],
)  # fmt: skip
def test_where_more_than_merges_decides_all_of_them_stay(setting):
    form = json.loads(all_pairs(1)[0].to_str())
    form["model"].update(setting)
    assert len(json.loads(compact(json.dumps(form).encode()))["model"]["merges"]) == len(form["model"]["merges"])


@pytest.mark.parametrize("change", [["a", "a"], ["a", "zz"], ["a"], "ab", "#version: 0.2"])
def test_merges_that_the_library_reads_in_its_own_way_stay(change):
    """One twice, of which the later one counts; and what is no pair of tokens."""
    form = json.loads(all_pairs(1)[0].to_str())
    merges = [["a", "a"], *form["model"]["merges"], change]
    form["model"]["merges"] = merges
    assert len(json.loads(compact(json.dumps(form).encode()))["model"]["merges"]) == len(merges)


def test_merges_stay_where_a_text_would_have_other_ids(monkeypatch):
    made, _ = all_pairs(2)
    real, whole = tokenizer_json._last_merge, len(json.loads(made.to_str())["model"]["merges"])
    monkeypatch.setattr(tokenizer_json, "_last_merge", lambda token, ranks: real(token, ranks) if len(token) < 5 else None)
    assert len(json.loads(compact(made.to_str().encode()))["model"]["merges"]) == whole
