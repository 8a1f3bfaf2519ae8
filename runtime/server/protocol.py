"""OpenAI's requests and responses, as far as aotc serves them, with vLLM's extra sampling fields."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from aotc.errors import RequestError
from aotc.runtime.sampling import SamplingParams

MAX_BODY = 8 << 20  # bytes
MAX_N = 16


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Common(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share. Unknown fields are ignored, as OpenAI's servers do."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class CompletionRequest(_Common, kw_only=True):
    """POST /v1/completions. The prompt is a text or token ids, or a list of texts or of lists of ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(_Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]


class BadRequest(RequestError):
    """A request that is refused with its own status; `param` names the field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def decode(body: bytes, kind: type) -> Any:
    """The request in a body. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise BadRequest(f"the body is not a valid request: {error}") from None


def sampling_params(
    request: CompletionRequest | ChatRequest, defaults: Mapping[str, Any], max_tokens: int
) -> SamplingParams:
    """The settings of a request: its own, then the model's generation config, then OpenAI's. Raises RequestError."""
    refused = {
        "best_of": getattr(request, "best_of", None) not in (None, 1),
        "suffix": bool(getattr(request, "suffix", None)),
        "echo": getattr(request, "echo", False),
        "tools": bool(getattr(request, "tools", None)),
        "response_format": (getattr(request, "response_format", None) or {}).get("type", "text") != "text",
    }
    for name, wanted in refused.items():
        if wanted:
            raise BadRequest(f"{name} is not supported yet", param=name)
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
    fields |= {k: defaults[k] for k in ("temperature", "top_p", "top_k", "repetition_penalty") if k in defaults}
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
             "repetition_penalty", "min_tokens", "stop_token_ids", "n")  # fmt: skip
    fields |= {n: getattr(request, n) for n in names if getattr(request, n) is not None}
    if fields.get("n", 1) > MAX_N:
        raise BadRequest(f"n must be at most {MAX_N}", param="n")
    stop = request.stop
    fields["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    fields["stop_token_ids"] = tuple(fields.get("stop_token_ids", ()))
    try:
        fields["logit_bias"] = {int(k): v for k, v in (request.logit_bias or {}).items()}
    except ValueError:
        raise BadRequest("logit_bias must map token ids to numbers", param="logit_bias") from None
    if isinstance(request, ChatRequest):
        asked = request.top_logprobs
        if asked is not None and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        fields["logprobs"] = (asked or 0) if request.logprobs else None
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    else:
        fields["logprobs"], limit = request.logprobs, 16 if request.max_tokens is None else request.max_tokens
    fields["max_tokens"] = max_tokens if limit is None else limit
    return SamplingParams(
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
        **fields,
    )


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def envelope(kind: Literal["completion", "chat"], stream: bool, request_id: str, model: str) -> dict[str, Any]:
    """What every response and chunk begins with."""
    if kind == "completion":
        return {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}
    suffix = ".chunk" if stream else ""
    return {
        "id": f"chatcmpl-{request_id}",
        "object": f"chat.completion{suffix}",
        "created": int(time.time()),
        "model": model,
    }
