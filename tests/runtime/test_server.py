"""The HTTP server over a fake engine process, through real sockets."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import tokenizers
import uvicorn

from aotc.runtime.chat_template import ChatTemplate
from aotc.runtime.server.app import Server, Settings
from aotc.runtime.server.engine_client import EngineClient
from aotc.runtime.server.metrics import Metrics
from aotc.runtime.tokenizer import Tokenizer

FAKE = Path(__file__).with_name("fake_engine.py")
VOCAB, MAX_LEN = 258, 200
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One token a byte, and two special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Tokenizer(path, {"eos_token_id": 257})


class Running:
    """A server in a thread, its engine in a process."""

    def __init__(self, folder, tokenizer, api_key=None, queue=64, seqs=4, template=TEMPLATE):
        self.folder = folder
        self.engine = EngineClient(str(folder), seqs, [sys.executable, str(FAKE)])
        settings = Settings("fake", MAX_LEN, VOCAB, api_key, queue)
        chat = ChatTemplate(template) if template else None
        self.server = Server(settings, self.engine, tokenizer, chat, Metrics("aotc", "fake"))
        config = uvicorn.Config(self.server.app(), log_level="warning", timeout_graceful_shutdown=5)
        self.uvicorn = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.thread = threading.Thread(target=lambda: asyncio.run(self.uvicorn.serve([self.socket])))
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert not alive(self.pids()[-1]) if self.pids() else True

    def wait_ready(self):
        wait(lambda: self.client.get("/health").status_code == 200)
        return self

    def log(self, event=None):
        path = self.folder / "log"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if event in (None, line["event"])]

    def pids(self):
        return [line["pid"] for line in self.log("start")]

    def complete(self, prompt, **fields):
        return self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})

    def chat(self, content, **fields):
        messages = [{"role": "user", "content": content}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    def metric(self, name):
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + "{"):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def wait(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def events(response):
    """The JSON of each server-sent event; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def server(tokenizer, tmp_path_factory):
    with Running(tmp_path_factory.mktemp("engine"), tokenizer) as running:
        yield running.wait_ready()


@pytest.fixture
def fresh(tokenizer, tmp_path):
    """fresh(**options) -> a server of its own, ended with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Running(tmp_path, tokenizer, **options))


# Answers


def test_completion(server):
    response = server.complete("abc", max_tokens=7)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["object"] == "text_completion" and body["model"] == "fake" and body["id"].startswith("cmpl-")
    assert abs(body["created"] - time.time()) < 60
    assert body["choices"] == [
        {"index": 0, "text": "abcabca", "finish_reason": "length", "stop_reason": None, "logprobs": None}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}


def test_the_default_of_completions_is_sixteen_tokens_and_of_chat_the_context(server):
    assert server.complete("abc").json()["usage"]["completion_tokens"] == 16
    assert server.chat("abc").json()["usage"]["completion_tokens"] == MAX_LEN - 3


def test_chat(server):
    body = server.chat("hello", max_completion_tokens=8).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hellohel"}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_adds_up_to_the_whole(server, kind):
    ask = server.complete if kind == "completion" else server.chat
    whole = ask("añc:", max_tokens=9).json()
    response = ask("añc:", max_tokens=9, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({c["id"] for c in chunks}) == 1
    choices = [c["choices"][0] for c in chunks]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    if kind == "chat":
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in choices) == whole["choices"][0]["message"]["content"]
        assert len(choices) > 4  # piece by piece
    else:
        assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"] and len(choices) > 3
    assert not any("usage" in c for c in events(ask("abc", max_tokens=2, stream=True)))


def test_prompts_as_text_ids_and_lists(server):
    ids = [ord(c) - 33 for c in "abc"]
    assert server.complete(ids, max_tokens=3).json()["choices"][0]["text"] == "abc"
    for prompts in (["abc", "xy"], [ids, [ord(c) - 33 for c in "xy"]]):
        body = server.complete(prompts, max_tokens=3).json()
        assert [c["text"] for c in body["choices"]] == ["abc", "xyx"]
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


def test_n_choices_differ_and_a_seed_repeats_them(server):
    def texts(**fields):
        body = server.complete("abcdefg", n=3, temperature=1, max_tokens=4, **fields).json()
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        return [c["text"] for c in body["choices"]]

    assert texts(seed=1) == texts(seed=1) == ["abcd", "bcde", "cdef"]
    assert texts(seed=0) == ["abcd", "bcde", "cdef"] and len(set(texts())) == 3
    streamed = events(server.complete("abcdefg", n=2, temperature=1, max_tokens=4, seed=1, stream=True))
    for index, text in enumerate(["abcd", "bcde"]):
        assert "".join(c["choices"][0]["text"] for c in streamed if c["choices"][0]["index"] == index) == text


def test_stop_strings_are_cut_off_wherever_pieces_end(server):
    for stream in (False, True):
        response = server.complete("abcdef", max_tokens=30, stop=["zz", "de"], stream=stream)
        choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
        assert "".join(c["text"] for c in choices) == "abc" and choices[-1]["finish_reason"] == "stop"
    body = server.complete("abcdef", max_tokens=30, stop="de", include_stop_str_in_output=True).json()
    assert body["choices"][0]["text"] == "abcde" and body["choices"][0]["stop_reason"] == "de"
    body = server.complete("abcdef", max_tokens=3, stop="cx").json()
    assert body["choices"][0]["text"] == "abc" and body["choices"][0]["finish_reason"] == "length"


def test_the_end_of_sequence_and_stop_ids(server):
    choice = server.chat("eos:3", max_tokens=9).json()["choices"][0]
    assert choice["message"]["content"] == "eos" and choice["finish_reason"] == "stop"
    choice = server.complete("abc", stop_token_ids=[ord("c") - 33]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", ord("c") - 33)


def test_logprobs(server):
    body = server.complete("ab", max_tokens=2, logprobs=2).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"] and logprobs["token_logprobs"] == [-0.5, -0.5]
    assert [set(t) for t in logprobs["top_logprobs"]] == [{'"', "#"}] * 2
    content = server.chat("ab", max_tokens=2, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert [(t["token"], t["logprob"], t["bytes"]) for t in content] == [("a", -0.5, [97]), ("b", -0.5, [98])]
    assert [len(t["top_logprobs"]) for t in content] == [1, 1]
    streamed = events(server.chat("ab", max_tokens=2, logprobs=True, stream=True))
    pieces = [c["choices"][0]["logprobs"] for c in streamed]
    assert [t["token"] for p in pieces if p for t in p["content"]] == ["a", "b"]


def test_models_tokenize_and_detokenize(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "fake" and model["max_model_len"] == MAX_LEN
    asked = server.client.post("/tokenize", json={"prompt": "ab"}).json()
    assert asked["tokens"] == [64, 65] and asked["count"] == 2
    assert server.client.post("/detokenize", json={"tokens": [64, 65]}).json() == {"prompt": "ab"}
