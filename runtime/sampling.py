"""How the next token is chosen: the request's settings, and the row of bytes that sampling kernels read.

Names and meanings are those of vLLM's `SamplingParams`; docs/sampling.md lists them with their formulas. The
kernel of CPUs is codegen/cpu/lib/sampler.h, the oracle of all targets aotc/ir/ops/sample_reference.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from aotc.errors import RequestError

INT32_MAX = 2**31 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 128  # n
GREEDY_BELOW = 1e-5  # temperature

_FIELDS = {
    "temperature": ("f4", 0),
    "top_p": ("f4", 4),
    "min_p": ("f4", 8),
    "repetition_penalty": ("f4", 12),
    "presence_penalty": ("f4", 16),
    "frequency_penalty": ("f4", 20),
    "top_k": ("i4", 24),  # 0: off
    "n_logprobs": ("i4", 28),  # -1: none, 0: the sampled token's, n: and those of the n best tokens
    "seed": ("u8", 32),
    "counter_base": ("u8", 40),  # upper half of Philox's counter: which of the request's n choices
    "bias_ids": ("u8", 48),  # address of i32 [bias_count]
    "bias_values": ("u8", 56),  # address of f32 [bias_count]
    "ban_ids": ("u8", 64),  # address of i32 [ban_count]
    "mask": ("u8", 72),  # address of u32 [mask_words]: bit i % 32 of word i / 32 allows id i; 0: no mask
    "bias_count": ("i4", 80),
    "ban_count": ("i4", 84),
    "ban_until": ("i4", 88),  # bans hold while history_len < ban_until
    "mask_words": ("i4", 92),  # ids past the mask are not allowed
    "prompt_len": ("i4", 96),
    "history_len": ("i4", 100),  # prompt and output so far: the position of the token to sample
    "reserved": (("u8", (3,)), 104),
}

SAMPLER_DTYPE = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [np.dtype(kind) for kind, _ in _FIELDS.values()],
        "offsets": [offset for _, offset in _FIELDS.values()],
        "itemsize": 128,
    }
)
"""One sequence's settings at one step: `SamplerRow` of codegen/cpu/lib/sampler.h, 128 bytes, little endian.

Addresses are of the memory of the device that samples.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of sampling. Raises `RequestError` that names the field and its range.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `max_tokens` None is as many
    as the context holds. `seed` None lets the engine choose one. `logprobs` n asks for the sampled token and
    the n best ones. `n` is how many choices to sample for the prompt.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_tokens": _optional_int("max_tokens", self.max_tokens, 1, INT32_MAX),
            "min_tokens": _int("min_tokens", self.min_tokens, 0, INT32_MAX),
            "temperature": _float("temperature", self.temperature, 0, 1000),
            "top_k": max(_int("top_k", self.top_k, -1, INT32_MAX), 0),
            "top_p": _float("top_p", self.top_p, 0, 1, above=True),
            "min_p": _float("min_p", self.min_p, 0, 1),
            "repetition_penalty": _float("repetition_penalty", self.repetition_penalty, 0.01, 100),
            "presence_penalty": _float("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _float("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _logit_bias(self.logit_bias),
            "seed": _optional_int("seed", self.seed, 0, 2**64 - 1),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "logprobs": _optional_int("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "n": _int("n", self.n, 1, MAX_CHOICES),
        }
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {_shown(getattr(self, name))}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"max_tokens ({self.max_tokens})"
            raise RequestError(f"min_tokens must be at most {limit}, got {self.min_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    def check_vocab(self, vocab_size: int) -> None:
        """Refuses ids of `logit_bias` and `stop_token_ids` that the model does not have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(f"{name} must hold token ids below {vocab_size}, got {token_id}")

    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`logit_bias` as the kernels read it: ids i32 [count], values f32 [count]."""
        ids = np.fromiter(self.logit_bias.keys(), np.int32, len(self.logit_bias))
        return ids, np.fromiter(self.logit_bias.values(), np.float32, len(self.logit_bias))

    def banned_ids(self, eos_ids: Sequence[int]) -> np.ndarray:
        """Ids that may not come before `min_tokens` tokens of output: i32 [count], empty for 0."""
        ids = sorted({*eos_ids, *self.stop_token_ids}) if self.min_tokens else []
        return np.array(ids, np.int32)


def fill_row(
    row: np.void,
    params: SamplingParams,
    *,
    seed: int,
    prompt_len: int,
    history_len: int | None = None,
    choice: int = 0,
    bias: tuple[int, int] = (0, 0),
    ban_ids: int = 0,
    ban_count: int = 0,
    mask: int = 0,
    mask_words: int = 0,
) -> None:
    """Writes all of `row`, one element of a `SAMPLER_DTYPE` array.

    `seed` is the one to use (`params.seed`, or the engine's choice). `choice` is which of `params.n` samples
    this is. `bias`: addresses of the arrays of `bias_arrays`. `ban_ids`: address of `banned_ids`; the kernel
    itself lifts the ban at `min_tokens`. Per step only `history_len` (default: `prompt_len`) and a grammar's
    `mask` change: write those fields alone.
    """
    values = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_k": params.top_k,
        "n_logprobs": -1 if params.logprobs is None else params.logprobs,
        "seed": seed,
        "counter_base": choice,
        "bias_ids": bias[0],
        "bias_values": bias[1],
        "ban_ids": ban_ids,
        "mask": mask,
        "bias_count": len(params.logit_bias),
        "ban_count": ban_count,
        "ban_until": min(prompt_len + params.min_tokens, INT32_MAX),
        "mask_words": mask_words,
        "prompt_len": prompt_len,
        "history_len": prompt_len if history_len is None else history_len,
        "reserved": 0,
    }
    if params.logit_bias and not all(bias):
        raise ValueError("logit_bias is set: fill_row needs the addresses of its arrays")
    for name, value in values.items():
        row[name] = value


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _int(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {_shown(value)}")
    return number


def _optional_int(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else _int(name, value, low, high)


def _float(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """`above` excludes `low`. A huge integer has no float, NaN is in no range."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not low <= number <= high or (above and number <= low):
        low_end = f"above {low} and at most" if above else f"from {low} to"
        raise RequestError(f"{name} must be a number {low_end} {high}, got {_shown(value)}")
    return number


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {_shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias must have at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    ids = [_int("a token id of logit_bias", token_id, 0, INT32_MAX) for token_id in bias]
    values = [_float("a value of logit_bias", value, -100, 100) for value in bias.values()]
    return dict(zip(ids, values, strict=True))


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop must be at most {MAX_STOP_STRINGS} strings, got {_shown(stop)}")
    for text in stops:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            lengths = f"strings of 1 to {MAX_STOP_LENGTH} characters"
            raise RequestError(f"stop must hold {lengths}, got {_shown(text)}")
    return tuple(stops)


def _token_ids(name: str, ids: Any, most: int) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > most:
        raise RequestError(f"{name} must be at most {most} token ids, got {_shown(ids)}")
    return tuple(_int(f"a token id of {name}", token_id, 0, INT32_MAX) for token_id in ids)
