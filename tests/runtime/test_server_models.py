"""Several models behind one address: each with its own engine, name, metrics and fate."""

import pytest
from serving import wait

from aotc.errors import RequestError
from aotc.runtime.server import engine_client
from aotc.runtime.server.opening import ModelOptions, parse_model

COMPLETIONS = "/v1/completions"


@pytest.fixture
def both(fresh):
    return fresh(names=("fake", "other/b")).wait_ready()


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.3,))


def test_requests_go_to_the_model_that_they_name(both):
    listed = both.client.get("/v1/models").json()["data"]
    assert [m["id"] for m in listed] == ["fake", "other/b"]
    assert both.client.get("/v1/models/other/b").json() == listed[1]
    for name in ("fake", "other/b"):
        body = both.complete("abc", max_tokens=4, model=name).json()
        assert (body["model"], body["choices"][0]["text"]) == (name, "abca")
        assert both.chat("x", max_tokens=2, model=name).json()["model"] == name
    engines = [model.engine for model in both.server.served.values()]
    assert engines[0]._process.pid != engines[1]._process.pid
    for name in ("fake", "other/b"):
        assert both.metric("aotc:generation_tokens_total", model_name=name) == 6


@pytest.mark.parametrize(("name", "status"), [(None, 400), ("third", 404)])
def test_requests_must_name_one(both, name, status):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = both.client.post(path, json={**body, "model": name})
        assert response.status_code == status and response.json()["error"]["param"] == "model"
        assert "fake, other/b" in response.json()["error"]["message"]


def test_one_that_dies_leaves_the_other_alone(both):
    broken = both.complete("kill:0", model="other/b")
    assert broken.status_code == 503
    assert both.complete("abc", max_tokens=3, model="fake").json()["choices"][0]["text"] == "abc"
    assert both.metric("aotc:engine_restarts_total", model_name="fake") == 0
    assert both.metric("aotc:engine_restarts_total", model_name="other/b") == 2
    response = both.client.get("/health/ready")
    assert response.json() == {"status": "not ready", "models": {"fake": "ready", "other/b": "not ready"}}
    assert response.status_code == 503 and both.client.get("/health/live").status_code == 200
    both.wait_ready()
    assert both.complete("abc", max_tokens=3, model="other/b").json()["choices"][0]["text"] == "abc"


def test_one_that_is_gone_for_good_leaves_the_other_alone(both, tmp_path):
    ended = []
    both.server.on_failure = lambda: ended.append(both.server.failure)
    (tmp_path / "other" / "b" / "refuse").write_text("weights.bin is damaged")
    assert both.complete("kill:0", model="other/b").json()["error"]["message"].endswith("weights.bin is damaged")
    assert both.complete("abc", max_tokens=3, model="fake").json()["choices"][0]["text"] == "abc"
    assert both.client.get("/health").json()["message"] == "weights.bin is damaged" and not ended
    (tmp_path / "refuse").write_text("gone too")
    both.complete("kill:0", model="fake")
    wait(lambda: ended)


def test_one_that_cannot_start_ends_the_server(fresh, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "refuse").write_text("weights.bin is damaged")
    running = fresh(names=("fake", "b"))
    running.server.on_failure = running.http.give_up
    wait(lambda: not running.thread.is_alive())
    assert running.server.failure == "weights.bin is damaged"


USUAL = ModelOptions("-", "-", "cpu", 64, None, "1GiB")


def test_options_of_a_model():
    assert parse_model("a=/x/y", USUAL) == ModelOptions("a", "/x/y", "cpu", 64, None, "1GiB")
    text = "org/a=x=y,device=cuda:1,max-num-seqs=8,kv-layout=paged,kv-cache-memory=2GB"
    assert parse_model(text, USUAL) == ModelOptions("org/a", "x=y", "cuda:1", 8, "paged", "2GB")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/x/y", "write NAME=DIR"), ("=x", "write NAME=DIR"), ("a=", "write NAME=DIR"), ("a=x,y", "'y' is no option"),
        ("a=x,device=", "no option"), ("a=x,device=cuda:", "choose auto, cpu"), ("a=x,device=cuda:-1", "choose auto"),
        ("a=x,max-num-seqs=0", "at least 1"), ("a=x,max-num-seqs=-1", "is a number"), ("a=x,kv-layout=b", "static or paged"),
        ("a=x,kv-cache-memory=lots", "lots"), ("a=x,port=1", "no option"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(text, message):
    with pytest.raises(RequestError, match=message):
        parse_model(text, USUAL)


@pytest.mark.parametrize(
    ("number", "visible", "expected"),
    [(0, None, "0"), (3, None, "3"), (1, "4,5", "5"), (0, "GPU-ab, 2", "GPU-ab"), (2, "4,5", "none"), (0, "", "0")],
)
def test_the_number_of_a_gpu_counts_the_visible_ones(number, visible, expected):
    assert engine_client._gpu(number, visible) == expected
