"""Tokens to text while they come: what is shown once is never taken back."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from aotc.errors import UnsupportedError
from aotc.runtime.tokenizer import Tokenizer


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Incremental `Tokenizer.decode`: what `push` and the final `flush` return adds up to `decode` of all
    ids.

    `push` returns text that no later token can change: never a part of a UTF-8 character, and the replacement
    character only for bytes that can no longer become one. The cost of a token does not grow with the text.
    Raises `UnsupportedError` for a tokenizer whose later tokens can change earlier text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        kinds = _decoder_kinds(tokenizer)
        self._decoder: _Decoder = _ByteLevel(tokenizer) if kinds == ["ByteLevel"] else _Windowed(tokenizer, kinds)

    def push(self, token_id: int) -> str:
        """The text that is final with this token; empty for skipped and unknown ids."""
        return "" if token_id in self._skipped else self._decoder.push(token_id)

    def flush(self) -> str:
        """The text that was held back. The next `push` starts anew."""
        return self._decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, special ones too: UTF-8 that may begin or end inside a character."""
        return self._decoder.token_bytes(token_id)


class StopStrings:
    """Cuts a stream of text at the first stop string, wherever pieces of the stream begin and end.

    The stream stops with the first character that completes a stop string; of several completed there, the
    longest one counts. What may be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop_str_in_output
        self._matched = [0] * len(self._stops)  # how much of each stop string the stream ends with
        self._held = ""

    def push(self, text: str, stops: bool = True) -> tuple[str, str | None]:
        """(text to show, stop string or None). Nothing is to be pushed after a stop.

        Without `stops`, a stop string that `text` completes does not count; one that it only begins may still stop
        the stream later.
        """
        if not self._held and self._beginnings.isdisjoint(text):
            return text, None
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            stopped_by = self._advance(pending[end])
            if stopped_by is not None and stops:
                self.flush()
                return pending[: end + 1 - (0 if self._include else len(stopped_by))], stopped_by
        shown = len(pending) - max(self._matched)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """What is held back, at the end of a stream that did not stop."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Knuth, Morris and Pratt's automaton of every stop string, one character on."""
        completed: str | None = None
        for i, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            length = self._matched[i]
            while length and stop[length] != char:
                length = failure[length - 1]
            length += stop[length] == char
            if length == len(stop):
                if completed is None or length > len(completed):
                    completed = stop
                length = failure[-1]  # where the stream goes on: the end of this one may begin the next
            self._matched[i] = length
        return completed


def _failure_function(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest proper prefix that it ends with."""
    failure, length = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = failure[length - 1]
        length += stop[length] == stop[i]
        failure[i] = length
    return failure


class _ByteLevel:
    """Byte-level BPE (GPT-2): tokens are bytes, and their text is UTF-8 with U+FFFD for what is none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self.token_bytes(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.token(token_id)
        return b"" if token is None else _token_bytes(token)

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


@lru_cache(maxsize=1 << 16)
def _token_bytes(token: str) -> bytes:
    """An added token with a character outside the alphabet (a plain space) is text as it stands."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


class _Windowed:
    """Any decoder that only looks at neighbours: decodes the tokens of the last piece with the new ones.

    The last piece is there because decoders treat the start of a text specially. Tokens that spell single
    bytes are held until the run of them ends: whether a run is UTF-8 is decided for the whole of it.
    """

    def __init__(self, tokenizer: Tokenizer, kinds: list[str]) -> None:
        self._tokenizer = tokenizer
        self._byte = re.compile(r"<0x[0-9A-F]{2}>") if "ByteFallback" in kinds else None
        self._window: list[int] = []
        self._shown_ids = 0  # of the window
        self._shown = ""  # their text

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        return "" if self._byte and self._byte.fullmatch(token) else self._show()

    def flush(self) -> str:
        text = self._show() if self._window else ""
        self._window, self._shown_ids, self._shown = [], 0, ""
        return text

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.token(token_id)
        if token is not None and self._byte and self._byte.fullmatch(token):
            return bytes.fromhex(token[3:5])
        # Its second occurrence: decoders treat the start of a text specially.
        once, twice = (self._tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :].encode()

    def _show(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        new = text[len(self._shown) :]
        last = self._tokenizer.decode(self._window[self._shown_ids :], skip_special_tokens=False)
        if last:  # else a token without text of its own would become the start of the text
            self._window, self._shown = self._window[self._shown_ids :], last
        else:
            self._shown = text
        self._shown_ids = len(self._window)
        return new


_LOCAL = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece", "BPEDecoder"}


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """The decoder's steps by name. Refuses those that change text which was final."""
    steps = tokenizer.decoder_steps
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return kinds
    for i, step in enumerate(steps):
        strips_much = step["type"] == "Strip" and (step["stop"] or step["start"] > 1)
        replaces_across_tokens = step["type"] == "Replace" and "Fuse" in kinds[:i]
        if step["type"] not in _LOCAL or strips_much or replaces_across_tokens:
            advice = "use a byte-level or SentencePiece tokenizer"
            raise UnsupportedError(f"tokenizer decoder {step['type']} cannot stream: {advice}")
    return kinds
