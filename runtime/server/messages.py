"""What the server and its engine process say to each other: msgpack in frames of a length (4 bytes) and a body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import TokenOutput

MAX_FRAME = 64 << 20


class Submit(msgspec.Struct, tag="submit"):
    """A request: token ids and the fields of its SamplingParams. `timeout` is seconds from its arrival at the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    seed: int
    choice: int
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None


class Cancel(msgspec.Struct, tag="cancel"):
    request_id: str


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded and warm. Bytes by purpose."""

    memory: dict[str, int]


class Load(msgspec.Struct, array_like=True):
    """How busy the engine is: sequences in its batch and waiting for a slot, share of the cache in use; and what it did
    since its last message: tokens of prompts looked up and found in the cache, seconds that requests waited for their
    first step, and its steps, (seconds, sequences, tokens) each."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    waits: list[float] = []
    steps: list[tuple[float, int, int]] = []


class Outputs(msgspec.Struct, tag="outputs"):
    """The tokens of one step."""

    tokens: list[TokenOutput]
    load: Load


class Refused(msgspec.Struct, tag="refused"):
    """The engine does not take a request: the message is the user's. Not now, where `retry_after` is set (seconds)."""

    request_id: str
    message: str
    retry_after: float | None = None


class Alive(msgspec.Struct, tag="alive"):
    """The engine's loop makes progress: sent about twice a second, and before a step of many tokens.

    `tokens` is how many the next step computes: the server waits the longer for it. `memory` has news of a GPU's bytes.
    """

    load: Load
    tokens: int = 0
    memory: dict[str, int] = {}


class Unusable(msgspec.Struct, tag="unusable"):
    """The engine does not start; the message is the user's. `may_pass`: it is the device's fault, not the artifact's,
    and another process may succeed later."""

    message: str
    may_pass: bool = False


Message = Submit | Cancel | Ready | Outputs | Refused | Alive | Unusable

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """A frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def unpack(body: bytes | bytearray) -> Message:
    """The message in a frame's body. Raises msgspec.MsgspecError."""
    return _decoder.decode(body)


def messages(buffer: bytearray) -> Iterator[Message]:
    """Takes every whole message out of what was received. Raises ValueError for what is none."""
    while len(buffer) >= 4:
        length = int.from_bytes(buffer[:4], "little")
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        if len(buffer) < 4 + length:
            return
        message = unpack(buffer[4 : 4 + length])
        del buffer[: 4 + length]
        yield message


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """The fields of params, as msgpack holds them."""
    return {name: getattr(params, name) for name in SamplingParams.__slots__}


def params_from_dict(fields: dict[str, Any]) -> SamplingParams:
    """The params; bias keys are token ids again."""
    bias = {int(k): v for k, v in fields.pop("logit_bias").items()}
    return SamplingParams(logit_bias=bias, **fields)
