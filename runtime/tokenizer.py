"""Text to token ids and back, over the `tokenizers` library, which is imported on first use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotc.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """The tokenizer of an artifact.

    `path` is a `tokenizer.json`. Of `config` it reads `eos_token_id` (an id or a list of ids) and
    `bos_token_id`, as in generation_config.json, and `bos_token` and `eos_token`, as in tokenizer_config.json.
    Raises `ArtifactError` if the file cannot be read or the config names tokens that are not in it.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        import tokenizers

        try:
            self.backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{Path(path).name}: not a tokenizer ({error})") from None
        # Settings for training batches: they would cut or lengthen prompts silently.
        self.backend.no_truncation()
        self.backend.no_padding()
        config = config or {}
        eos = config.get("eos_token_id")
        self.eos_token_ids = tuple(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
        self.bos_token_id: int | None = config.get("bos_token_id")
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for token_id in (*self.eos_token_ids, *bos):
            if type(token_id) is not int or token_id < 0 or self.token(token_id) is None:
                raise ArtifactError(f"{Path(path).name}: the config names token id {token_id!r}, not in it")
        self.bos_token = _spelling(config.get("bos_token")) or self._first_of(bos)
        self.eos_token = _spelling(config.get("eos_token")) or self._first_of(self.eos_token_ids)
        """Texts of the tokens, as chat templates write them; empty if there are none. A model can stop at several
        tokens and name another one of them in its template: without `eos_token`, the first id counts."""

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def decoder_steps(self) -> list[dict[str, Any]]:
        """What `decode` does with the tokens' spellings, step by step, as tokenizer.json writes it."""
        decoder = self.backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "Sequence", "decoders": []}
        return state["decoders"] if state["type"] == "Sequence" else [state]

    def _first_of(self, ids: tuple[int, ...]) -> str:
        return (self.token(ids[0]) or "") if ids else ""

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id, None for an unknown one."""
        return self.backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True, *, max_bytes: int | None = None) -> list[int]:
        """Token ids of `text`, which has at most `max_bytes` bytes of UTF-8.

        A chat template writes special tokens itself: encode its output with `add_special_tokens=False`.
        Raises `RequestError` for a longer text, and for a lone surrogate, which UTF-8 cannot hold.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {type(text).__name__}")
        if max_bytes is not None and len(text) > max_bytes:  # before anything is copied
            raise RequestError(f"text must have at most {max_bytes} bytes of UTF-8, got over {len(text)}")
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"text has a lone surrogate at character {error.start}") from None
        if max_bytes is not None and size > max_bytes:
            raise RequestError(f"text must have at most {max_bytes} bytes of UTF-8, got {size}")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; unknown ids have none. Raises `RequestError` for what cannot be an id."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise RequestError("token ids must be integers from 0 to 4294967295") from None


def _spelling(token: Any) -> str:
    """tokenizer_config.json has tokens as text, or as an object with the text and how it is matched."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
