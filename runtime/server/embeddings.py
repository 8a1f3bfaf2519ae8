"""POST /v1/embeddings, as OpenAI has it. Text encoders run in the server's own process, through their batcher."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from aotc.errors import RequestError
from aotc.runtime.embedder import Embedder
from aotc.runtime.server.protocol import BadRequest

if TYPE_CHECKING:
    from aotc.artifact.reader import Artifact

MAX_INPUTS = 2048  # OpenAI's bound


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The input is a text or token ids, or a list of texts or of lists of ids. `truncate_prompt_tokens` is vLLM's: -1
    leaves out what is longer than the model takes, which is an error otherwise. What is not listed is ignored (`user`)."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(eq=False)
class ServedEncoder:
    """A text encoder under the name that requests ask for."""

    name: str
    embedder: Embedder
    request_timeout: float | None = None  # seconds within which a request's runs begin
    unfinished: int = 0  # requests

    def card(self) -> dict[str, Any]:
        """Its entry in /v1/models."""
        most = self.embedder.max_length
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "aotc", "max_model_len": most}


def open_encoder(artifact: Artifact, name: str, device: str, request_timeout: float | None = None) -> ServedEncoder:
    """A text encoder, loaded. Raises AotcError."""
    from aotc.runtime.devices.opening import begin_opening

    opening = begin_opening(artifact.path, device)
    return ServedEncoder(name, Embedder(artifact, device=device, opening=opening), request_timeout)


def choose(encoders: Mapping[str, ServedEncoder], name: str | None) -> ServedEncoder:
    """The encoder that a request asks for; it may leave the name out where there is one only. Raises BadRequest."""
    if name is None and len(encoders) == 1:
        return next(iter(encoders.values()))
    if name is not None and name in encoders:
        return encoders[name]
    known = f"the text encoders served here: {', '.join(encoders) or 'none'}"
    if name is None:
        raise BadRequest(f"model must be one of {known}", param="model")
    raise BadRequest(f"the model {name[:80]!r} is not one of {known}", 404, "model", "model_not_found")


async def answer(encoder: ServedEncoder, asked: EmbeddingRequest, most_unfinished: int) -> dict[str, Any]:
    """The response's object. Raises BadRequest and other AotcErrors."""
    embedder, texts = encoder.embedder, inputs(asked.input)
    if asked.dimensions not in (None, embedder.hidden_size):
        raise BadRequest(
            f"the model's vectors have {embedder.hidden_size} dimensions: leave it out", param="dimensions"
        )
    if asked.truncate_prompt_tokens not in (None, -1, embedder.max_length):
        raise BadRequest(f"truncate_prompt_tokens is -1 or {embedder.max_length}", param="truncate_prompt_tokens")
    if encoder.unfinished >= most_unfinished:
        raise BadRequest("too many requests are waiting: try again later", 429, code="rate_limit_exceeded")
    encoder.unfinished += 1
    try:
        deadline = None if encoder.request_timeout is None else encoder.request_timeout * 1e3
        truncate = asked.truncate_prompt_tokens is not None
        tokens = await embedder.aencode(texts, truncate=truncate)
        vectors = await embedder.aembed(tokens, deadline_ms=deadline)
    except RequestError as error:
        if getattr(error, "status", 400) != 400:
            raise
        code = "context_length_exceeded" if "tokens, and the model takes" in str(error) else None
        raise BadRequest(str(error), param="input", code=code) from None
    finally:
        encoder.unfinished -= 1
    count = sum(map(len, tokens))
    return {
        "object": "list", "model": encoder.name,
        "data": [
            {"object": "embedding", "index": n, "embedding": _spelt(vector, asked.encoding_format)}
            for n, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }  # fmt: skip


def inputs(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The texts of a request, each a text or token ids. Raises BadRequest."""
    if isinstance(given, str):
        return [given]
    ids = [x for x in given if isinstance(x, int)]
    if given and len(ids) == len(given):
        return [ids]
    if ids or not 1 <= len(given) <= MAX_INPUTS:
        raise BadRequest(f"input must be a text, token ids, or 1 to {MAX_INPUTS} of either", param="input")
    return [x for x in given if not isinstance(x, int)]


def _spelt(vector: np.ndarray, encoding: str) -> Any:
    """Numbers, or the bytes of little-endian f32 as base64, which clients read faster."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
