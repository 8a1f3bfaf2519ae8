"""Lengths, prompts and arrivals: their distributions, and the same ones again for the same seed."""

import asyncio
import json
import math

import numpy as np
import pytest
from fake_server import whole

from aotc.errors import RequestError
from aotc.loadtest.client import Client
from aotc.loadtest.session import Load, parse_sweep
from aotc.loadtest.workload import CHAT, COMPLETIONS, WORDS, Prompts, Shape, arrivals, find_tokens


def rng(seed=0):
    return np.random.default_rng(seed)


def test_poisson_arrivals():
    times = np.array(arrivals(rng(), 4000, 20.0))
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(200.0) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)  # of an exponential distribution
    assert (gaps < gaps.mean()).mean() == pytest.approx(1 - 1 / math.e, abs=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_arrivals(burstiness):
    gaps = np.diff(arrivals(rng(), 4000, 5.0, burstiness), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_even_arrivals_and_all_at_once():
    assert arrivals(rng(), 4, 2.0, math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert arrivals(rng(), 3, math.inf) == [0.0, 0.0, 0.0]


def test_lengths():
    inputs, outputs = Shape(1, 100, 10, 0.25).lengths(rng(), 2000)
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (75, 125, 7, 13)
    assert np.mean(inputs) == pytest.approx(100, abs=2)
    assert Shape(1, 100, 10).lengths(rng(), 2) == ([100, 100], [10, 10])
    inputs, outputs = Shape(1, 1, 1, 0.9).lengths(rng(), 200)
    assert min(inputs + outputs) == 1
    assert Shape(1, 100, 10, 0.25, 7).longest == 7 + 125 + 13


@pytest.mark.parametrize(
    "wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 1.0), (1, 1, 1, -0.1), (1, 1, 1, 0.0, -1)]
)
def test_wrong_shapes(wrong):
    with pytest.raises(RequestError, match="--"):
        Shape(*wrong)


def drawn(endpoint, tokens, shape, seed=0, count=5):
    prompts = Prompts(Client("http://x"), endpoint, tokens, shape, {"model": "m"})
    asked = prompts.draw(rng(seed), count)
    return asked, [json.loads(a.data.partition(b"\r\n\r\n")[2]) for a in asked]


def test_prompts_of_tokens():
    shape = Shape(5, 20, 4, 0.5, prefix_len=6)
    asked, bodies = drawn(COMPLETIONS, [3, 5, 900], shape)
    assert [len(b["prompt"]) for b in bodies] == [a.prompt_len for a in asked]
    assert [b["max_tokens"] for b in bodies] == [a.output_len for a in asked]
    assert {token for b in bodies for token in b["prompt"]} == {3, 5, 900}
    assert len({tuple(b["prompt"][:6]) for b in bodies}) == 1  # the prefix
    assert len({tuple(b["prompt"][6:16]) for b in bodies}) == 5
    assert drawn(COMPLETIONS, [3, 5, 900], shape)[1] == bodies
    assert drawn(COMPLETIONS, [3, 5, 900], shape, seed=1)[1] != bodies
    expected = {"stream": True, "stream_options": {"include_usage": True}, "model": "m"}
    assert {k: bodies[0][k] for k in expected} == expected


def test_prompts_of_words():
    _, (body, *_) = drawn(COMPLETIONS, None, Shape(1, 9, 4))
    words = body["prompt"].split(" ")
    assert len(words) == 9 and {*words} <= {*WORDS}
    _, (body, *_) = drawn(CHAT, [3], Shape(1, 9, 4))
    (message,) = body["messages"]
    assert message["role"] == "user" and len(message["content"].split(" ")) == 9
    assert body["max_completion_tokens"] == 4 and "max_tokens" not in body and "prompt" not in body


def test_words_are_a_token_each(smollm2_gguf):
    from tokenizers import Tokenizer

    from aotc.frontend.checkpoint import open_checkpoint

    tokenizer = Tokenizer.from_str(open_checkpoint(str(smollm2_gguf)).tokenizer_json.decode())
    assert len(tokenizer.encode(" " + " ".join(WORDS), add_special_tokens=False).ids) == len(WORDS)


def tokens_of(server):
    async def find():
        client = Client(server.url)
        try:
            return await find_tokens(client, "m")
        finally:
            client.close()

    return asyncio.run(find())


def test_tokens_of_the_server(serve):
    server = serve()
    assert tokens_of(server) == [7, 11, 13]
    _, _, body = server.asked[0]
    assert body["model"] == "m" and body["prompt"] == body["content"] and body["prompt"].split() == [*WORDS]


@pytest.mark.parametrize(
    "answer", [whole(404, {}), whole(200, {"ids": [1]}), whole(200, {"tokens": []}), whole(200, b"x")]
)
def test_a_server_without_tokens(serve, monkeypatch, answer):
    server = serve()
    monkeypatch.setattr(server, "_parts", lambda path, body: [answer])
    assert tokens_of(server) is None


def test_sweeps():
    base = Load(5.0, 3, 0.5)
    assert parse_sweep(None, base) == ("concurrency", (base,))
    assert parse_sweep("1,16", base) == ("concurrency", (Load(5.0, 1, 0.5), Load(5.0, 16, 0.5)))
    assert parse_sweep("concurrency=4", base) == parse_sweep("4", base)
    assert parse_sweep("rate=0.5,inf", base) == ("rate", (Load(0.5, 3, 0.5), Load(math.inf, 3, 0.5)))


@pytest.mark.parametrize("text", ["", "1,", "0", "1.5", "-1", "nan", "inf", "users=1", "rate=0", "rate=x"])
def test_wrong_sweeps(text):
    with pytest.raises(RequestError, match=r"--sweep .*: write 1,4,16"):
        parse_sweep(text, Load(1.0, None))
