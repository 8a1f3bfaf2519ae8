"""tokenizer.json as an artifact has it: what the source says, in the form that is read fastest."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_DECIDING = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
"""Settings of a BPE model by which more than merges decides what becomes of a text's letters."""


def compact(data: bytes) -> bytes:
    """The same tokenizer without blanks and escapes, its vocabulary in the order of the tokens' bytes, in which the library
    puts it anyway, and its merges as texts, without those that no text leads to: 128k tokens are read in less than half the
    time. What is no vocabulary with ids stays as it is: scores need not survive being written anew."""
    try:
        found = json.loads(data)
        model = found["model"]
        model["vocab"] = dict(sorted(model["vocab"].items(), key=lambda token: token[0].encode()))
        if "merges" in model:
            model["merges"] = _as_texts(_without_unreachable(model))
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # ValueError: a lone surrogate too
        return data


def _as_texts(merges: list[Any]) -> list[Any]:
    """["a", "b"] -> "a b", the older form, unless one of them would be read as something else."""

    def plain(merge: Any) -> bool:
        return isinstance(merge, list) and len(merge) == 2 and all(m and " " not in m for m in merge)

    if not all(plain(merge) and not merge[0].startswith("#version") for merge in merges):
        return merges
    return [" ".join(merge) for merge in merges]


def _without_unreachable(model: dict[str, Any]) -> list[Any]:
    """The model's merges but for those that never happen, where nothing but merges decides.

    Vocabularies that come from tiktoken list every pair of tokens that makes a token. Which pair of neighbours is merged
    next depends on ranks alone, so what happens within the letters of a token, before they are one, is what happens to
    these letters alone: of all pairs that make a token, only the last one of that run is ever merged.
    """
    merges, vocab = model["merges"], model["vocab"]
    if model.get("type") != "BPE" or any(model.get(name) for name in _DECIDING):
        return merges
    pairs = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in merges]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    known = all(len(p) == 2 and p[0] in vocab and p[1] in vocab and "".join(p) in vocab for p in pairs)
    if not known or len(ranks) < len(pairs) or len({*vocab.values()}) < len(vocab):
        return merges
    ways: dict[str, list[Any]] = {}
    for pair in pairs:
        ways.setdefault("".join(pair), []).append(pair)
    happens: dict[Any, bool] = {pair: len(ways["".join(pair)]) == 1 for pair in pairs}
    for token, several in ways.items():
        if len(several) > 1:
            happens[_last_merge(token, ranks)] = True
    fewer = [pair for pair in pairs if happens[pair]]
    if len(fewer) == len(pairs) or not _same_ids(vocab, pairs, fewer):
        return merges
    return [[*pair] for pair in fewer]


def _last_merge(token: str, ranks: dict[Any, int]) -> tuple[str, str] | None:
    """The pair that is merged last in a token's letters, None where they do not become one."""
    parts, pair, never = [*token], None, len(ranks)
    while len(parts) > 1:
        rank, at = min((ranks.get(p, never), n) for n, p in enumerate(zip(parts, parts[1:], strict=False)))
        if rank == never:
            return None
        pair = parts[at], parts[at + 1]
        parts[at : at + 2] = ["".join(pair)]
    return pair


def _same_ids(vocab: dict[str, int], pairs: list[Any], fewer: list[Any]) -> bool:
    """Whether the texts of all tokens, alone and some after each other at random, have the same ids with fewer merges."""
    import tokenizers

    def texts() -> Iterator[str]:
        tokens = [*vocab]
        yield from tokens
        random.Random(0).shuffle(tokens)
        yield from ("".join(tokens[n : n + 4]) for n in range(0, len(tokens), 4))

    one, other = (tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges)) for merges in (pairs, fewer))
    return all(one.encode(text).ids == other.encode(text).ids for text in texts())
