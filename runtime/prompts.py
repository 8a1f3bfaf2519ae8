"""What callers of a language model give, in all the forms that they may give it in."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple

from aotc.errors import RequestError
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import SessionKey


class Terms(NamedTuple):
    """What a call asks besides its tokens: how long it may take, who goes before it, and whose it is."""

    deadline_ms: float | None = None
    priority: int = 0
    session: SessionKey = SessionKey("", "")


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__")


def prompts(prompt: Any) -> tuple[list[Any], bool]:
    """(prompts, whether it was one alone). Raises RequestError for what is neither text nor token ids nor a list."""
    if isinstance(prompt, str):
        return [prompt], True
    try:
        items = list(prompt)
    except TypeError:
        raise RequestError(f"a prompt is text or token ids, got {type(prompt).__name__}") from None
    return ([items], True) if items and _is_id(items[0]) else (items, False)


def token_ids(prompt: Any) -> list[int]:
    try:
        return [operator.index(t) for t in prompt]
    except TypeError:
        raise RequestError(f"a prompt is text or token ids, got {type(prompt).__name__}") from None


def sampling_params(params: Any, settings: dict[str, Any], count: int, alone: bool) -> list[SamplingParams]:
    """The settings of each prompt: lists are of one for each."""
    seeds = settings.pop("seed", None)
    given = [params] * count if params is None or isinstance(params, SamplingParams) else list(params)
    seeds = [seeds] * count if seeds is None or _is_id(seeds) or alone else list(seeds)
    for name, values in (("params", given), ("seed", seeds)):
        if len(values) != count:
            raise RequestError(f"{name} has {len(values)} entries for {count} prompts: give one for each")
    made = []
    for own, seed in zip(given, seeds, strict=True):
        changed = settings if seed is None else {**settings, "seed": seed}
        made.append(SamplingParams(**changed) if own is None else replace(own, **changed) if changed else own)
    return made
