"""Reference of sampling: what every target's sampler must compute. Plain numpy, one row at a time.

The order of the filters is that of vLLM's V1 sampler, the random numbers are Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). docs/sampling.md states every formula. Logits are
changed and compared in float32, as in the kernels; sums and exponentials are float64.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_LOGPROBS = 20
NAN, EMPTY = -1, -2  # instead of a token: a logit is NaN or +inf; no token is left
GREEDY_BELOW = np.float32(1e-5)

_F32 = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_U64 = ("seed", "counter_base", "bias_ids", "bias_values", "ban_ids", "mask")
_I32 = ("bias_count", "ban_count", "ban_until", "mask_words", "prompt_len", "history_len")
ROW = np.dtype(
    [(name, "f4") for name in _F32]
    + [("top_k", "i4"), ("n_logprobs", "i4")]
    + [(name, "u8") for name in _U64]
    + [(name, "i4") for name in _I32]
    + [("reserved", "u8", (3,))]
)
"""The 128 bytes of one row's settings; aotc/runtime/sampling.py says what the fields mean."""


@dataclass(frozen=True)
class Sampled:
    """`token` is an id, NAN or EMPTY. `logprobs` f32 [21] and `ids` i32 [21]: of the token, then of the best
    ones; the rest is 0 and -1. `margin`: how far, relatively, the nearest decision was from going the other
    way; a kernel may differ where that is of the size of float32's rounding."""

    token: int
    logprobs: np.ndarray
    ids: np.ndarray
    margin: float


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds: counter u32 [4], key u32 [2] -> u32 [4]."""
    c0, c1, c2, c3 = (int(word) for word in counter)
    k0, k1 = (int(word) for word in key)
    low = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & low, (a >> 32) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return np.array([c0, c1, c2, c3], np.uint32)


def uniform(seed: int, counter_base: int, position: int) -> float:
    """In [0, 1) with 53 bits: the draw for the token at `position`."""
    counter = np.array([position, 0, counter_base & 0xFFFFFFFF, counter_base >> 32], np.uint32)
    r = philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))
    return ((int(r[0]) >> 5) * 2**26 + (int(r[1]) >> 6)) / 2**53


def sample_row(logits: np.ndarray, row: Any, history: np.ndarray) -> Sampled:
    """logits f32 [vocab]; `row`, an element of a `ROW` array with addresses of this process; history i32."""
    logprobs, ids = np.zeros(MAX_LOGPROBS + 1, np.float32), np.full(MAX_LOGPROBS + 1, -1, np.int32)
    if np.isnan(logits).any() or logits.max() == np.inf:
        return Sampled(NAN, logprobs, ids, np.inf)
    if logits.max() == -np.inf:
        return Sampled(EMPTY, logprobs, ids, np.inf)
    x = _penalised(_biased(logits, row), row, history[: row["history_len"]])
    if np.isnan(x).any() or x.max() == np.inf:
        return Sampled(NAN, logprobs, ids, np.inf)
    if x.max() == -np.inf:
        return Sampled(EMPTY, logprobs, ids, np.inf)
    token, margin = _greedy(x) if row["temperature"] < GREEDY_BELOW else _drawn(x, row)
    if row["n_logprobs"] >= 0:
        best = np.argsort(-logits, kind="stable")[: min(row["n_logprobs"], MAX_LOGPROBS)]
        count = 1 + len(best)
        ids[:count] = [token, *best]
        logprobs[:count] = _log_softmax(logits)[ids[:count]]
    return Sampled(token, logprobs, ids, margin)


def sample_rows(
    logits: np.ndarray, settings: np.ndarray, history: np.ndarray, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A batch: logits f32 [rows, vocab], settings u8 [rows, 128], history i32 [slots, length], index [rows].

    Returns tokens i32 [rows], logprobs f32 [rows, 21], ids i32 [rows, 21] and `history`, in which the token
    of row r now stands at [index[r], history_len]; NAN, EMPTY and what is past the end are not written.
    """
    rows = np.ascontiguousarray(settings).view(ROW)[:, 0]
    sampled = [sample_row(logits[r], rows[r], history[index[r]]) for r in range(len(rows))]
    for r, result in enumerate(sampled):
        if result.token >= 0 and rows[r]["history_len"] < history.shape[1]:
            history[index[r], rows[r]["history_len"]] = result.token
    tokens = np.array([result.token for result in sampled], np.int32)
    return tokens, np.stack([s.logprobs for s in sampled]), np.stack([s.ids for s in sampled]), history


def _at(address: Any, dtype: str, count: Any) -> np.ndarray:
    """A copy of `count` elements of this process's memory."""
    if not address or count <= 0:
        return np.empty(0, dtype)
    return np.frombuffer(ctypes.string_at(int(address), int(count) * 4), dtype)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _biased(logits: np.ndarray, row: Any) -> np.ndarray:
    """Logit bias, the grammar's mask, the ids banned for now. Ids out of the vocabulary do nothing."""
    x, vocab = logits.copy(), len(logits)
    ids = _at(row["bias_ids"], "i4", row["bias_count"])
    values = _at(row["bias_values"], "f4", row["bias_count"])
    known = (ids >= 0) & (ids < vocab)
    np.add.at(x, ids[known], values[known])
    if row["mask"]:
        bits = np.unpackbits(_at(row["mask"], "u4", row["mask_words"]).view("u1"), bitorder="little")[:vocab]
        x[: len(bits)][bits == 0] = -np.inf
        x[len(bits) :] = -np.inf
    if row["history_len"] < row["ban_until"]:
        banned = _at(row["ban_ids"], "i4", row["ban_count"])
        x[banned[(banned >= 0) & (banned < vocab)]] = -np.inf
    return x


def _penalised(x: np.ndarray, row: Any, history: np.ndarray) -> np.ndarray:
    """Repetition over prompt and output (Keskar et al. 2019), then frequency and presence over output."""
    vocab, known = len(x), history[(history >= 0) & (history < len(x))]
    output = history[row["prompt_len"] :]
    count = np.bincount(output[(output >= 0) & (output < vocab)], minlength=vocab)
    seen = np.bincount(known, minlength=vocab) > 0
    with np.errstate(over="ignore"):
        repeated = np.where(x > 0, x / row["repetition_penalty"], x * row["repetition_penalty"])
    penalised = repeated - row["frequency_penalty"] * count.astype(np.float32)
    penalised = penalised - np.where(count > 0, row["presence_penalty"], np.float32(0))
    return np.where(seen, penalised, x)


def _greedy(x: np.ndarray) -> tuple[int, float]:
    """The first of the largest; the margin tells it from the next lower logit."""
    token = int(np.argmax(x))
    lower = x[x < x[token]]
    return token, _gap(x[token], lower.max()) if lower.size else np.inf


def _gap(a: Any, b: Any) -> float:
    """Distance of two float32, relative to the larger."""
    a, b = float(a), float(b)
    return np.inf if np.isinf(a) or np.isinf(b) else abs(a - b) / max(abs(a), abs(b), 1e-30)


def _drawn(x: np.ndarray, row: Any) -> tuple[int, float]:
    """Temperature, min_p, top_k, top_p, and one draw from what they keep, ids ascending."""
    scaled = (x - x.max()) * (np.float32(1) / row["temperature"])
    weights = np.where(scaled < -87, 0, np.exp(scaled.astype(np.float64)))
    margins = [np.inf]

    keep = weights >= row["min_p"]
    if row["min_p"] > 0:
        margins.append(np.abs(weights / row["min_p"] - 1).min())
    if 0 < row["top_k"] < len(x):
        ranked = np.sort(x)[::-1]
        border = ranked[row["top_k"] - 1]
        keep &= x >= border
        lower = x[x < border]
        margins.append(_gap(border, lower.max()) if lower.size else np.inf)
    if row["top_p"] < 1:
        keep, margin = _nucleus(weights, keep, row["top_p"])
        margins.append(margin)

    ids = np.flatnonzero(keep & (weights > 0))
    running = np.cumsum(weights[ids])
    target = uniform(int(row["seed"]), int(row["counter_base"]), int(row["history_len"])) * running[-1]
    chosen = min(int(np.searchsorted(running, target, side="right")), len(ids) - 1)
    before = running[chosen - 1] if chosen else -np.inf
    after = running[chosen] if chosen < len(ids) - 1 else np.inf
    margins.append(min(target - before, after - target) / running[-1])
    return int(ids[chosen]), float(min(margins))


def _nucleus(weights: np.ndarray, keep: np.ndarray, top_p: Any) -> tuple[np.ndarray, float]:
    """Keeps a token while the better ones together have less than top_p of the mass; equal ones alike."""
    values, counts = np.unique(weights[keep], return_counts=True)
    values, mass = values[::-1], (values * counts)[::-1]
    reached = np.cumsum(mass)
    target = float(top_p) * reached[-1]
    border = min(int(np.searchsorted(reached, target, side="left")), len(values) - 1)
    margins = [abs(reached[border] - target) / reached[-1]]
    if border > 0:
        margins.append(abs(reached[border - 1] - target) / reached[-1])
    for other in values[max(border - 1, 0) : border + 2]:
        if other != values[border]:
            margins.append(abs(other / values[border] - 1) if values[border] > 0 else np.inf)
    return keep & (weights >= values[border]), float(min(margins))
