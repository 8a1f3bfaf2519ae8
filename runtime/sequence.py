"""A request while it runs: its tokens, its place in the cache, what it still has to compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from aotc.runtime.kv_cache import BlockTable
from aotc.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the engine: token ids in, token ids out; text is the layer above."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    choice: int = 0


class TokenOutput(NamedTuple):
    """One new token of a request. `finish_reason` is stop, length or error on the last one.

    `logprobs` lists (token id, log probability): the sampled one, then the best ones, where asked for.
    `stop_reason` is the token id that stopped the request.
    """

    request_id: str
    token_id: int
    logprobs: tuple[tuple[int, float], ...]
    finish_reason: str | None
    stop_reason: int | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """State of a running request. `computed` counts the tokens whose keys and values are in the cache."""

    request: Request
    slot: int
    tokens: list[int]
    computed: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_len: int = 0
    bias: tuple[np.ndarray, np.ndarray] | None = None
    bans: np.ndarray | None = None
    outputs: list[int] = field(default_factory=list)
    pages: BlockTable | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def pending(self) -> int:
        """Tokens known but not in the cache: the prompt's rest, or the last sampled token."""
        return len(self.tokens) - self.computed


class Row(NamedTuple):
    """A sequence's part of a step: `count` tokens from `start`. `samples` when the last known token is among them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
