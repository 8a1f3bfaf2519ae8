"""A measurement from the first question to the last answer: which model, warm-up, a run for each load."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from aotc.errors import RequestError
from aotc.loadtest.client import Client, api_error, explain
from aotc.loadtest.generator import Outcome, run_load
from aotc.loadtest.goals import Memory, read_memory
from aotc.loadtest.streams import StreamError
from aotc.loadtest.workload import CHAT, Prompts, Shape, arrivals, find_tokens

_T = TypeVar("_T")


@dataclass(frozen=True)
class Load:
    """Requests a second, infinite for all at once, and the most that are unanswered (None: any number)."""

    rate: float
    concurrency: int | None
    burstiness: float = 1.0


@dataclass(frozen=True)
class Settings:
    """What is measured, and how. `fields` stand in every request beside prompt and length."""

    endpoint: str
    shape: Shape
    loads: tuple[Load, ...]
    model: str | None = None
    api_key: str | None = None
    seed: int = 0
    warmups: int = 1
    timeout: float = 600.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What came of it: outcomes and seconds of each load, in their order."""

    model: str
    exact: bool  # prompts had the tokens that were asked for
    runs: tuple[tuple[list[Outcome], float], ...]
    memory: Memory | None


async def measure(
    url: str, settings: Settings, note: Callable[[str], None], done: Callable[[int, Outcome], None]
) -> Measured:
    """Measures the server at `url`. `done` sees the number of the load and each outcome as it comes.

    Raises RequestError where the server cannot be asked, or does not answer a first request.
    """
    with contextlib.closing(Client(url, settings.api_key, settings.timeout)) as client:
        model = await _choose_model(client, settings)
        tokens = None
        if settings.endpoint != CHAT:
            tokens = await _quietly(find_tokens(client, model))
            if tokens is None:
                note("the server has no /tokenize: prompts are words, and their tokens about as many as asked for")
        fields = {"model": model, **settings.fields}
        prompts = Prompts(client, settings.endpoint, tokens, settings.shape, fields)
        await _warm_up(client, prompts, settings)
        runs = []
        for n, load in enumerate(settings.loads):
            rng = np.random.default_rng((settings.seed, n))  # other prompts for each: the server may remember
            count = settings.shape.num_prompts
            asked = prompts.draw(rng, count)
            due = arrivals(rng, count, load.rate, load.burstiness)
            runs.append(await run_load(client, asked, due, load.concurrency, lambda o, n=n: done(n, o)))
        return Measured(model, tokens is not None, tuple(runs), await _quietly(_memory(client)))


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def _choose_model(client: Client, settings: Settings) -> str:
    """The model that is asked for, or the server's first. Raises RequestError."""
    try:
        status, body = await client.fetch(client.request("GET", "/v1/models"))
    except (StreamError, OSError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else explain(error)
        raise RequestError(f"cannot ask {client.url}/v1/models ({why}): is the server up?") from None
    if status in (401, 403):
        raise RequestError(f"{client.url}: {api_error(status, '', body)}: give the key with --api-key")
    known = []
    if status == 200:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            known = msgspec.json.decode(body, type=_Models).data
    if settings.model is None and not known:
        raise RequestError(f"{client.url}/v1/models names no model ({status}): name one with --model")
    name = settings.model or known[0].id
    most = next((m.max_model_len for m in known if m.id == name), None)
    if most is not None and settings.shape.longest > most:
        longest = settings.shape.longest
        raise RequestError(
            f"{name} takes {most} tokens, a prompt with its answer has up to {longest}: make them shorter"
        )
    return name


async def _warm_up(client: Client, prompts: Prompts, settings: Settings) -> None:
    count = settings.warmups
    if not count:
        return
    most = min((load.concurrency or count for load in settings.loads), default=count)
    asked = prompts.draw(np.random.default_rng((settings.seed, 1 << 32)), count)
    outcomes, _ = await run_load(client, asked, [0.0] * count, most)
    for outcome in outcomes:
        if outcome.error is not None:
            raise RequestError(f"{client.url} does not answer a first request: {outcome.error}")


async def _memory(client: Client) -> Memory | None:
    status, body = await client.fetch(client.request("GET", "/metrics"))
    return read_memory(body.decode(errors="replace")) if status == 200 else None


async def _quietly(question: Awaitable[_T]) -> _T | None:
    """The answer to a question that not every server knows; None where the connection failed."""
    try:
        return await question
    except (StreamError, OSError):
        return None


def parse_sweep(text: str | None, base: Load) -> tuple[str, tuple[Load, ...]]:
    """`1,4,16` or `concurrency=1,4,16` as loads of so many requests at once, `rate=1,2.5` of so many a second; their
    kind comes first. Without a text it is the base alone. Raises RequestError."""
    if text is None:
        return "concurrency", (base,)
    kind, _, values = text.rpartition("=")
    kind = kind or "concurrency"
    try:
        numbers = [float(value) for value in values.split(",")]
        if kind not in ("concurrency", "rate") or not all(n > 0 for n in numbers):
            raise ValueError
        if kind == "rate":
            return kind, tuple(Load(n, base.concurrency, base.burstiness) for n in numbers)
        if not all(n.is_integer() for n in numbers):
            raise ValueError
        return kind, tuple(Load(base.rate, int(n), base.burstiness) for n in numbers)
    except ValueError:
        raise RequestError(f"--sweep {text}: write 1,4,16 (requests at once) or rate=1,2,4 (a second)") from None


def load_values(kind: str, loads: Sequence[Load]) -> list[float]:
    """The number that differs between the loads of a sweep."""
    return [load.rate if kind == "rate" else float(load.concurrency or 0) for load in loads]
