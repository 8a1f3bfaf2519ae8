"""Servers over a fake engine: one a module for plain questions, and fresh ones for tests that break something. GPUs
over a fake driver, and an artifact for them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import serving
import tokenizers
from fake_cuda import FakeDriver
from fake_executor import USUAL
from serving import Running, alive, wait

from aotc.artifact.reader import open_artifact
from aotc.cli import main
from aotc.runtime.devices.cuda import CudaDevice
from aotc.runtime.tokenizer import Tokenizer


@pytest.fixture(params=["in_step", "ahead"])
def both_ways(request, monkeypatch):
    """The fake device ends a step before the next one begins, or takes one more meanwhile."""
    monkeypatch.setitem(USUAL, "runs_ahead", request.param == "ahead")
    return request.param


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


@pytest.fixture
def process(byte_tokenizer, tmp_path):
    """A server process of its own: (process, its address, the engine's pid)."""
    path = tmp_path / "tokenizer.json"
    byte_tokenizer.backend.save(str(path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, serving.__file__, str(tmp_path), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as server:
        try:
            address = ("127.0.0.1", int(server.stdout.readline()))
            (engine,) = wait(lambda: serving.log_of(tmp_path, "start"))
            yield server, address, engine["pid"]
        finally:
            server.kill()
            for line in serving.log_of(tmp_path, "start"):  # a test that failed leaves none behind either
                if alive(line["pid"]):
                    os.kill(line["pid"], signal.SIGKILL)


@pytest.fixture(scope="session")
def cuda_artifact(tmp_path_factory, tiny_config, byte_tokenizer):
    """A tiny Llama for two GPU architectures, with programs for 1 and 2 rows and for 128 and 160 tokens."""
    folder = tmp_path_factory.mktemp("cuda")
    config = {**tiny_config, "max_position_embeddings": 256, "vocab_size": 258}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer.backend.save(str(folder / "tokenizer.json"))
    arguments = ["compile", str(folder), "--weights", "random:7", "--arch", "sm80,sm90", "--max-num-seqs", "2", "--dtype", "bf16"]
    assert main([*arguments, "--max-num-batched-tokens", "160", "-o", str(folder / "artifact"), "--quiet"]) == 0
    return open_artifact(folder / "artifact")


@pytest.fixture
def use_driver(monkeypatch):
    """use_driver(driver): it stands in for the machine's."""

    def use(driver):
        monkeypatch.setattr("aotc.runtime.devices.cuda.Driver", lambda: driver)
        return driver

    return use


@pytest.fixture
def fake_driver(use_driver):
    """fake_driver(**options): a driver that stands in for the machine's."""
    return lambda **options: use_driver(FakeDriver(**options))


@pytest.fixture
def gpu(fake_driver):
    """gpu(**options) -> (the device, its driver)."""

    def make(**options):
        driver = fake_driver(**options)
        return CudaDevice(), driver

    return make


@pytest.fixture
def install_driver(tmp_path, monkeypatch):
    """install_driver(expression): processes that are started have that object as their driver."""

    def install(expression):
        lines = ("import broken_cuda, fake_cuda", f"driver = {expression}", "fake_cuda.api.Driver = lambda: driver")
        (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(Path(__file__).parent)
        monkeypatch.syspath_prepend(tmp_path)

    return install
