"""A text encoder in this process: texts in, vectors out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.artifact.reader import Artifact
from aotc.errors import ArtifactError, RequestError
from aotc.runtime.tensor_model import TensorModel
from aotc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aotc.runtime.devices.opening import Opening

BYTES_A_TOKEN = 128  # a text with more bytes for each token that the model takes is refused before it is looked at
LONG_TEXT = 1 << 14  # characters, or tokens, that an event loop does not look at itself
MOST_TOKENS = 4096  # of a call, padding included: more do not run faster, and take more memory


class Embedder:
    """A loaded text encoder. Thread-safe. A context manager that closes it.

    `max_length` is how many tokens a text may have, `hidden_size` how many numbers a vector has, and `normalized`
    whether these have length 1, so that their products are cosines. Options are those of a TensorModel's batcher:
    `max_batch_size`, `max_wait_ms`, `min_batch_size` and `preferred_batch_sizes`.
    """

    def __init__(
        self, artifact: Artifact, *, device: str = "auto", opening: Opening | None = None, **batching: Any
    ) -> None:  # fmt: skip
        if not artifact.has("tokenizer.json"):
            raise ArtifactError(f"{artifact.path} has no tokenizer: compile the model again")
        self.artifact, entry = artifact, artifact.manifest.model
        self.model = TensorModel(artifact, device=device, opening=opening, **batching)
        self.tokenizer = Tokenizer(artifact.file("tokenizer.json"))
        self.memory = self.model.memory
        """Exact bytes of what this model allocated."""
        self.max_length, self.normalized = entry.max_model_len, entry.normalize
        self._vocab_size, self._max_batch = entry.vocab_size, entry.max_rows
        self._max_shared = min(entry.max_rows, batching.get("max_batch_size") or entry.max_rows)
        (output,) = self.model.plan.outputs
        size = output.shape[1]
        assert isinstance(size, int)
        self.hidden_size = size

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all memory, after calls that run now. Calls raise RequestError afterwards."""
        self.model.close()

    def encode(self, texts: Sequence[str], *, truncate: bool = False) -> list[list[int]]:
        """Token ids of each text, those that the model wants around it included. They can be given to `embed`.

        Raises RequestError for a text of more than `max_length` tokens; with `truncate` its end is left out.
        """
        return [self._encode(text, truncate) for text in texts]

    def embed(self, texts: str | Sequence[str | Sequence[int]], *, truncate: bool = False) -> np.ndarray:
        """Vectors f32 [n, hidden_size] of texts, or of token ids of each text. One text is n = 1.

        Raises RequestError for a text of more than `max_length` tokens, unless `truncate` says to leave its end out,
        and for token ids that the model does not have.
        """
        tokens = self._tokens(texts, truncate)
        out = np.empty((len(tokens), self.hidden_size), np.float32)
        for places in batches([len(t) for t in tokens], self._max_batch):
            ids, lengths = padded([tokens[n] for n in places])
            out[places] = self.model(input_ids=ids, lengths=lengths)["embeddings"]
        return out

    async def aencode(
        self, texts: str | Sequence[str | Sequence[int]], *, truncate: bool = False
    ) -> list[list[int]]:  # fmt: skip
        """`encode` for an event loop, which long texts do not hold up. Token ids are checked, as `embed` does."""
        if (len(texts) if isinstance(texts, str) else sum(map(len, texts))) > LONG_TEXT:
            return await asyncio.to_thread(self._tokens, texts, truncate)
        return self._tokens(texts, truncate)

    async def aembed(
        self, texts: str | Sequence[str | Sequence[int]], *, truncate: bool = False,
        deadline_ms: float | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The same for an event loop: computed together with texts of other callers that are alike in length.

        Raises DeadlineExceeded, too, where a run did not begin within `deadline_ms`.
        """
        tokens = await self.aencode(texts, truncate=truncate)
        out = np.empty((len(tokens), self.hidden_size), np.float32)
        runs = []
        try:
            for places in batches([len(t) for t in tokens], self._max_shared):
                ids, lengths = padded([tokens[n] for n in places], self._shared_length(tokens, places))
                future = self.model.submit(deadline_ms=deadline_ms, input_ids=ids, lengths=lengths)
                runs.append((places, future))
            for places, future in runs:
                out[places] = (await future)["embeddings"]
        finally:
            for _, future in runs:  # of which one failed, or the caller gave up
                future.cancel()
        return out

    def _shared_length(self, tokens: list[list[int]], places: list[int]) -> int:
        """The padded length that requests share a queue at: that of the longest one's bucket."""
        return min(bucket(len(tokens[places[0]])), self.max_length)

    def _tokens(self, texts: str | Sequence[str | Sequence[int]], truncate: bool) -> list[list[int]]:
        several = [texts] if isinstance(texts, str) else texts
        return [self._encode(t, truncate) if isinstance(t, str) else self._checked(t, truncate) for t in several]

    def _encode(self, text: str, truncate: bool) -> list[int]:
        ids = self.tokenizer.encode(text, max_bytes=None if truncate else BYTES_A_TOKEN * self.max_length)
        if len(ids) <= self.max_length:
            return ids
        if not truncate:
            raise RequestError(_too_long(len(ids), self.max_length))
        backend = self.tokenizer.backend
        encoding = backend.encode(text, add_special_tokens=False)
        encoding.truncate(self.max_length - backend.num_special_tokens_to_add(False))
        return backend.post_process(encoding).ids

    def _checked(self, ids: Sequence[int], truncate: bool) -> list[int]:
        """Token ids that a caller made; cut at the end, whatever stands there."""
        if not ids:
            raise RequestError("a text without tokens has no embedding: give at least one")
        if len(ids) > self.max_length and not truncate:
            raise RequestError(_too_long(len(ids), self.max_length))
        for token in ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{token!r:.40} is no token id: they are whole numbers from 0 to {self._vocab_size - 1}"
                )
        return list(ids[: self.max_length])


def _too_long(count: int, most: int) -> str:
    return f"the text has {count} tokens, and the model takes {most}: shorten it, or ask for truncation"


def padded(tokens: Sequence[Sequence[int]], length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids i32 [batch, length], lengths i32 [batch]), padded to the longest, or to `length` where that is more."""
    lengths = np.array([len(t) for t in tokens], np.int32)
    ids = np.zeros((len(tokens), max(int(lengths.max()), length)), np.int32)
    for row, own in zip(ids, tokens, strict=True):
        row[: len(own)] = own
    return ids, lengths


def batches(lengths: Sequence[int], max_batch: int) -> Iterator[list[int]]:
    """Places of texts that are computed together, longest first: in one bucket, so that little of it is padding.

    Which texts share a call does not change their vectors by more than rounding.
    """
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        most = max(1, min(max_batch, MOST_TOKENS // longest))
        stop = start + 1
        while stop < len(order) and stop - start < most and bucket(lengths[order[stop]]) == bucket(longest):
            stop += 1
        yield order[start:stop]
        start = stop


def bucket(length: int) -> int:
    """The least of 8, 16, 24, 32, 48, 64, 96, 128, ... that a length fits into."""
    if length <= 32:
        return -(-length // 8) * 8
    step = 1 << (length - 1).bit_length() - 2
    return -(-length // step) * step
