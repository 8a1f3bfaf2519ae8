"""What is asked and when: prompts of random tokens, and arrivals, as `vllm bench serve` draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from aotc.errors import RequestError
from aotc.loadtest.client import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could go "
    "come did my sound no most number who over know water than call first people may down side been now find any new "
    "work part take get place made live where after back little only round man year came show every good me give our "
    "under name very through just form much great think say help low line before turn cause same mean move right boy "
    "old too does tell set three want air well also play small end put home read hand large spell add even land here "
    "must big high such follow act why ask men change went light kind off need house picture try us again animal point "
    "mother world near build self earth father head stand own page should country found answer school grow study still "
    "learn plant cover food sun four thought let keep eye never last door between city tree cross since hard start "
    "might story saw far sea draw left late run press close night real life few stop"
)
WORDS = tuple(_TEXT.split())
"""Common words, each of them one token of nearly every vocabulary when a blank is before it."""


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens: of each prompt after the prefix that all share, and of each answer. Lengths are uniform from
    floor(n (1 - ratio)) to ceil(n (1 + ratio)), and at least 1."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if min(self.num_prompts, self.input_len, self.output_len) < 1 or self.prefix_len < 0:
            raise RequestError("--num-prompts, --random-input-len and --random-output-len are at least 1")
        if not 0 <= self.range_ratio < 1:
            raise RequestError("--random-range-ratio is at least 0 and less than 1")

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.prefix_len + sum(math.ceil(n * (1 + self.range_ratio)) for n in (self.input_len, self.output_len))

    def lengths(self, rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Lengths of prompts without their prefix, and of answers."""

        def draw(mean: int) -> list[int]:
            low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
            return rng.integers(max(low, 1), high + 1, size=count).tolist()

        return draw(self.input_len), draw(self.output_len)


@dataclass(frozen=True)
class Asked:
    """A request, ready to be sent."""

    data: bytes
    prompt_len: int
    output_len: int


def arrivals(rng: np.random.Generator, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """When each of `count` requests is sent, in seconds from the start.

    The gaps follow a gamma distribution of mean 1 / rate and shape `burstiness` (1: a Poisson process), and are scaled
    so that the last request comes at count / rate, as vLLM does. An infinite rate is all at once; an infinite
    burstiness is even gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, 1 / burstiness, size=count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist() if times[-1] else [0.0] * count


async def find_tokens(client: Client, model: str) -> list[int] | None:
    """Ids of ordinary tokens, as the server's own tokenizer spells WORDS; None where it has no /tokenize.

    aotc and vLLM take the text as `prompt`, llama-server as `content`.
    """
    text = " " + " ".join(WORDS)
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
    status, answer = await client.fetch(client.request("POST", "/tokenize", body))
    if status != 200:
        return None
    try:
        ids = msgspec.json.decode(answer, type=_Tokens).tokens
    except msgspec.MsgspecError:
        return None
    return sorted(set(ids)) or None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Prompts:
    """Draws requests. The completions endpoint is sent `tokens`, where they are known: prompts then have exactly the
    length that is asked for. Else it is words, with about one token each, and the server says how many there were."""

    def __init__(self, client: Client, endpoint: str, tokens: list[int] | None, shape: Shape, fields: dict[str, Any]):
        self._client, self._endpoint, self._shape, self._fields = client, endpoint, shape, fields
        self._tokens = np.array(tokens) if tokens and endpoint == COMPLETIONS else None

    def draw(self, rng: np.random.Generator, count: int) -> list[Asked]:
        source = np.arange(len(WORDS)) if self._tokens is None else self._tokens
        prefix = rng.choice(source, self._shape.prefix_len)
        inputs, outputs = self._shape.lengths(rng, count)
        return [
            self._asked(np.concatenate([prefix, rng.choice(source, length)]).tolist(), output)
            for length, output in zip(inputs, outputs, strict=True)
        ]

    def _asked(self, ids: list[int], output_len: int) -> Asked:
        prompt = " ".join(WORDS[n] for n in ids) if self._tokens is None else ids
        if self._endpoint == CHAT:
            said = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
        else:
            said = {"prompt": prompt, "max_tokens": output_len}
        body = {**said, "stream": True, "stream_options": {"include_usage": True}, **self._fields}
        return Asked(self._client.request("POST", self._endpoint, body), len(ids), output_len)
