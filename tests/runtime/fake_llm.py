"""LLMs over fake devices: the model's next token is a hash of the history, and a test decides when a step goes on."""

import threading
import time
from types import SimpleNamespace

import pytest
from fake_executor import EOS, VOCAB, FakeExecutor, all_free, expected

from aotc.runtime import llm as llm_module
from aotc.runtime.llm import LLM

__all__ = ["EOS", "VOCAB", "Device", "answer", "engine_threads", "expected", "until"]


def until(condition):
    """Waits for what another thread does, which takes as long as it takes."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def engine_threads():
    """Threads that step engines; other tests' leftovers are none."""
    return [t for t in threading.enumerate() if t.name == "aotc-engine"]


class Device(FakeExecutor):
    """`before` is called at the start of a step, in the thread that runs it; `hold` makes the next one wait for `go`, and
    `hold_after` the one after so many."""

    def __post_init__(self):
        super().__post_init__()
        self.startup, self.closed, self.memory = {}, 0, SimpleNamespace(total=1)
        self.threads, self.stepping = [], False
        self.before = lambda rows: None
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def warm(self):
        pass

    def step(self, rows):
        assert not self.closed and not self.stepping, "one step at a time, none after close"
        self.stepping = True
        try:
            self.threads.append(threading.get_ident())
            self.entered.set()
            assert self.gate.wait(30)
            self.before(rows)
            return super().step(rows)
        finally:
            self.stepping = False

    def close(self):
        assert not self.stepping, "closed in the middle of a step"
        self.closed += 1

    def hold(self):
        self.entered.clear()
        self.gate.clear()

    def hold_after(self, steps):
        self.before = lambda rows: len(self.steps) == steps - 1 and self.hold()

    def go(self):
        self.gate.set()


class Artifact:
    """Of a language model without files."""

    path = "fake"

    def __init__(self, length):
        self.manifest = SimpleNamespace(model=SimpleNamespace(eos_token_ids=(EOS,), max_model_len=length))

    def has(self, name):
        return name == "tokenizer.json"  # the test's own


@pytest.fixture
def fake_llm(byte_tokenizer, monkeypatch):
    """fake_llm(**fields of Device) -> (an LLM, its device). At the end, whatever was asked has left nothing behind."""
    made = []

    def make(**fields):
        device = Device(**{"max_model_len": 100, **fields})
        monkeypatch.setattr(llm_module, "open_executor", lambda *_: device)
        llm = LLM(Artifact(device.max_model_len))
        llm._tokenizer = byte_tokenizer
        made.append((llm, device))
        return llm, device

    yield make
    for llm, device in made:
        device.go()
        if not device.closed:
            until(lambda llm=llm, device=device: all_free(llm.engine, device) and not llm._shared._calls)
        llm.close()
        assert device.closed == 1
    assert "aotc-engine" not in [t.name for t in threading.enumerate()]


def answer(prompt, count=6, seed=0):
    """What the fake model says, as token ids."""
    return tuple(expected(prompt, count, seed))
