"""Options and fixtures that all tests share."""

import signal
from pathlib import Path

import hypothesis
import pytest

from benchmarks.fetch_encoder import fetch as fetch_encoder
from benchmarks.fetch_model import fetch

# The same examples on every run; `make soak` looks for new ones.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("default")


# A shell's background jobs and nohup ignore signals, and processes that tests start would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be rewritten from what the code gives now."""
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that the tests run from."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """A real model, 98 MB, fetched once a machine; fails, not skips, when it cannot be had."""
    return fetch()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A real text encoder's folder, 91 MB, fetched once a machine; fails, not skips, when it cannot be had."""
    return fetch_encoder()


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 200, "hidden_size": 72,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""A Llama with 9 heads over 3, small enough for interpreters."""


@pytest.fixture(scope="session")
def tiny_config():
    """config.json of a tiny Llama; its weights are made with `--weights random:SEED`."""
    return TINY
