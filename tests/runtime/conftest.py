"""Servers over a fake engine: one a module for plain questions, and fresh ones for tests that break something."""

import contextlib

import pytest
import tokenizers
from serving import Running

from aotc.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """One token a byte, and two special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Tokenizer(path, {"eos_token_id": 257})


@pytest.fixture(scope="module")
def server(byte_tokenizer, tmp_path_factory):
    """A server that all tests of a module ask."""
    with Running(tmp_path_factory.mktemp("engine"), byte_tokenizer) as running:
        yield running.wait_ready()


@pytest.fixture
def fresh(byte_tokenizer, tmp_path):
    """fresh(**options) -> a server of its own, ended with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Running(tmp_path, byte_tokenizer, **options))
