"""The log: one line an event, with what operators look for, and without what clients said."""

import io
import json
import logging

import pytest

from aotc.runtime.server import logs

SECRET = "hunter2"


@pytest.fixture
def log():
    """log(form, level) -> lines(): what the server's loggers write; their state is put back."""
    loggers = [logging.getLogger(name) for name in logs.LOGGERS]
    before = [(x.handlers[:], x.level, x.propagate) for x in loggers]
    stream = io.StringIO()

    def start(form="json", level="info"):
        logs.configure(form, level, stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def events(lines, event):
    return [line for line in map(json.loads, lines()) if line["event"] == event]


def test_requests_and_accesses_as_json(fresh, log):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    lines = log()
    running = fresh(access_log=True).wait_ready()
    headers = {"X-Request-Id": "id-1"}
    body = {"prompt": SECRET, "max_tokens": 3, "temperature": 0, "n": 2, "stop": [SECRET * 2], "user": SECRET}
    assert running.client.post("/v1/completions?" + SECRET, json=body, headers=headers).status_code == 200
    streamed = {"messages": [{"role": "user", "content": SECRET}], "stream": True, "max_tokens": 2}
    running.client.post("/v1/chat/completions", json=streamed)
    running.client.post("/v1/completions", json={"prompt": SECRET, "temperature": SECRET})
    running.client.get("/v1/models")
    running.client.get("/metrics")
    first, second = events(lines, "request")
    assert first["request_id"] == "id-1" and first["model"] == "fake" and first["outcome"] == "done"
    assert (first["prompt_tokens"], first["tokens"], first["choices"]) == (len(SECRET), 6, 2)
    assert 0 < first["ttft"] <= first["latency"] < 60 and second["tokens"] == 2
    accesses = events(lines, "access")
    assert [(a["method"], a["path"], a["status"]) for a in accesses] == [
        ("POST", "/v1/completions", 200), ("POST", "/v1/chat/completions", 200), ("POST", "/v1/completions", 400),
        ("GET", "/v1/models", 200),
    ]  # fmt: skip
    assert accesses[0]["request_id"] == "id-1" and accesses[0]["client"] == "127.0.0.1"
    for line in map(json.loads, lines()):
        assert {"time", "level", "event"} <= set(line) and line["time"].endswith("Z")
    assert SECRET not in "\n".join(lines())
    assert (root.handlers, root.level) == before


def test_failures_and_clients_that_left(fresh, log):
    lines = log()
    running = fresh().wait_ready()
    assert running.complete("nan:0").status_code == 500
    with running.client.stream("POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 150, "stream": True}):
        pass
    running.http.should_exit = True
    running.thread.join(10)
    assert [e["outcome"] for e in events(lines, "request")] == ["error", "abort"]


def test_text(log):
    lines = log("text")
    logs.tell(logging.getLogger("aotc.server"), logging.INFO, "request", model="m", ttft=0.25, nothing=None)
    logs.tell(logging.getLogger("aotc.server"), logging.DEBUG, "quiet")
    (line,) = lines()
    assert line.endswith(" INFO request model=m ttft=0.25") and line[4] == "-"


def test_one_line_whatever_is_logged(log):
    lines = log()
    try:
        raise ValueError("two\nlines \ud800")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("broken\n%s", object())
    (line,) = lines()
    said = json.loads(line)
    assert said["level"] == "error" and said["event"].startswith("broken\n<object") and "ValueError" in said["trace"]


def test_loggers_of_others_are_left_alone(log, capsys):
    lines = log(level="debug")
    logging.getLogger("someone").error("x")
    logging.getLogger("aotc").error("y")
    assert lines() == []
