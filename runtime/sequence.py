"""A request while it runs: its tokens, its place in the cache, what it still has to compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from aotc.errors import RequestError
from aotc.runtime.deadlines import require_time
from aotc.runtime.kv_cache import BlockTable
from aotc.runtime.offload import SavedPages
from aotc.runtime.sampling import SamplingParams


class SessionKey(NamedTuple):
    """Whose conversation: the session `name` among the requests of one `salt`. Without a name there is none."""

    salt: str
    name: str


def require_turn(priority: Any, cache_salt: Any) -> None:
    """Raises RequestError for a priority that is no integer of 32 bits, or a salt that is no text."""
    if not isinstance(priority, Integral) or not -(2**31) <= int(priority) < 2**31:
        raise RequestError("priority must be an integer of 32 bits: a lower one goes first, 0 is the usual one")
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a text, got {type(cache_salt).__name__}")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the engine: token ids in, token ids out; text is the layer above.

    A lower `priority` goes first. `deadline` is a time of the engine's clock: a request that is not done by then ends.
    Prefixes are shared among requests of one `cache_salt` alone, so that no tenant learns what another one asked.
    What a request with a `session` leaves in the cache is kept for the next one of that session and that salt, see
    `kept.py`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    session: str = ""

    def __post_init__(self) -> None:
        """Raises RequestError for what nobody could put in an order."""
        require_turn(self.priority, self.cache_salt)
        require_time(self.deadline)

    @property
    def session_key(self) -> SessionKey:
        return SessionKey(self.cache_salt, self.session)


class TokenOutput(NamedTuple):
    """One new token of a request. `finish_reason` is stop, length, error or deadline on the last one; with error and
    deadline there is no token: `token_id` is -1.

    `logprobs` lists (token id, log probability): the sampled one, then the best ones, where asked for.
    `stop_reason` is the token id that stopped the request. `cached_tokens` of its prompt were not computed, but found
    in the cache: the same number on all outputs of a request.
    """

    request_id: str
    token_id: int
    logprobs: tuple[tuple[int, float], ...]
    finish_reason: str | None
    stop_reason: int | None = None
    cached_tokens: int = 0


NO_SLOT = -1
UNKNOWN = -1  # a token that a step samples which has not ended: the device knows it before the host


@dataclass(eq=False, slots=True)
class Sequence:
    """A request from its submission to its end. While it waits it has no slot and no pages, and `computed` is 0.

    `computed` counts the tokens whose keys and values are in the cache, `flying` those after them that a step computes
    which has not ended; where it samples, the last of `tokens` is UNKNOWN. `digests` names the full pages of its tokens, as
    far as they were asked for; `saved` is what was copied out of its pages when it lost them.
    """

    request: Request
    slot: int
    tokens: list[int]
    computed: int = 0
    flying: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_len: int = 0
    bias: tuple[np.ndarray, np.ndarray] | None = None
    bans: np.ndarray | None = None
    outputs: list[int] = field(default_factory=list)
    pages: BlockTable | None = None
    number: int = 0  # in the order of submission
    since: float = 0.0  # when it began to wait
    cached_tokens: int | None = None  # of its prompt when it first ran; None before
    digests: list[bytes] = field(default_factory=list)
    saved: SavedPages | None = None
    ended: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def reached(self) -> int:
        """Tokens in the cache once every step has ended that was begun."""
        return self.computed + self.flying

    @property
    def pending(self) -> int:
        """Tokens that no step has taken in: the prompt's rest, or the last sampled token."""
        return len(self.tokens) - self.computed - self.flying

    @property
    def complete(self) -> bool:
        """Whether its last token is known, or about to be: it is as long as it may become."""
        return len(self.tokens) >= self.max_len

    def launch(self, row: Row) -> None:
        """Takes note that a step with this row has begun."""
        self.flying += row.count
        if row.samples:
            self.tokens.append(UNKNOWN)

    def land(self, row: Row) -> None:
        """Takes note that it has ended."""
        self.flying -= row.count
        self.computed += row.count

    def forget_steps(self) -> None:
        """It ends while steps run that compute more of it: what they give counts no more."""
        self.flying = 0
        while self.tokens[-1] == UNKNOWN:
            self.tokens.pop()

    @property
    def turn(self) -> tuple[int, int]:
        """Who goes first: the lower."""
        return self.request.priority, self.number


class Row(NamedTuple):
    """A sequence's part of a step: `count` tokens from `start`. `samples` when the last known token is among them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
