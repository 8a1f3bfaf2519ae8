"""Requests to a fake server: what is sent, what is measured, and faults, each of which is counted and none a hang."""

import asyncio
import json
import socket

import pytest
from fake_server import DONE, OK, answer, chunk, event, token, usage, whole

from aotc.errors import RequestError
from aotc.loadtest.client import Client
from aotc.loadtest.generator import ask, run_load
from aotc.loadtest.streams import MOST
from aotc.loadtest.workload import Asked

ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


def word(text, reason=None):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


def outcomes_of(url, count=1, concurrency=None, timeout=20.0, due=None):
    """Outcomes of `count` requests for three tokens each, and how many connections are kept in the end."""

    async def run():
        client = Client(url, timeout=timeout)
        data = client.request("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
        asked = [Asked(data, 2, 3)] * count
        outcomes, seconds = await run_load(client, asked, due or [0.0] * count, concurrency)
        assert seconds >= max(o.latency for o in outcomes)
        kept = len(client._idle)
        client.close()
        return outcomes, kept

    return asyncio.run(run())


def one(url, **options):
    (outcome,), _ = outcomes_of(url, **options)
    return outcome


def stream(*events):
    return [OK, *map(chunk, events), b"0\r\n\r\n"]


def test_a_good_answer(serve):
    outcome = one(serve().url)
    assert (outcome.error, outcome.prompt_len, outcome.output_len, len(outcome.itl)) == (None, 2, 3, 2)
    assert 0 < outcome.ttft <= outcome.latency
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itl))
    assert outcome.tpot == pytest.approx(sum(outcome.itl) / 2)


def test_times_are_those_of_tokens(serve):
    """The first token comes after the speaker, and the answer ends with its last token, not with what comes after."""
    wait = 0.2
    parts = [OK, chunk(ROLE), wait, chunk(word("a")), wait, chunk(word("b", "stop")), wait, chunk(usage(5, 7) + DONE)]
    outcome = one(serve(lambda body, n: [*parts, b"0\r\n\r\n"]).url)
    assert (outcome.prompt_len, outcome.output_len, len(outcome.itl)) == (5, 7, 1)
    # Bounds from below alone: a machine that is busy makes any wait longer.
    assert outcome.ttft >= wait * 0.9 and outcome.itl[0] >= wait * 0.5
    assert outcome.latency == pytest.approx(outcome.ttft + outcome.itl[0])


@pytest.mark.parametrize(
    ("events", "tokens", "gaps"),
    [
        ([token(), token(), token(reason="stop"), DONE], 3, 2),  # no usage: events are counted
        ([ROLE, word("a"), word("b", "stop")], 2, 1),  # a reason in place of [DONE]
        ([token(), usage(2, 9), DONE], 9, 0),  # several tokens an event
        ([token(), b": a comment\n\n", b"event: x\nid: 1\n\n", event({"choices": None}), DONE], 1, 0),
        (
            [event({"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 4}}), DONE],
            4,
            0,
        ),
        # A last event without text is no token where others account for all of them, as llama-server's.
        ([token(), token(), token("", "length"), usage(2, 2), DONE], 2, 1),
        ([token(), token(), token("", "length"), usage(2, 3), DONE], 3, 2),
        ([token(), token(""), token("", "stop"), DONE], 3, 2),
        ([ROLE, word("a"), word(None, "stop"), usage(2, 1), DONE], 1, 0),
        ([token("", "stop"), usage(2, 0), DONE], 1, 0),
        ([event({"choices": [{"delta": {"role": "assistant", "reasoning_content": "x"}}]}), DONE], 1, 0),
    ],
)
def test_forms_of_streams(serve, events, tokens, gaps):
    outcome = one(serve(lambda body, n: stream(*events)).url)
    assert (outcome.error, outcome.output_len, len(outcome.itl)) == (None, tokens, gaps)


def test_a_byte_at_a_time_and_all_at_once(serve):
    data = b"".join(answer({"max_tokens": 3, "prompt": [1, 2]}))
    pieces = [data[n : n + 1] for n in range(len(data))]
    for parts in (pieces, [data]):
        outcome = one(serve(lambda body, n, parts=parts: parts).url)
        assert (outcome.error, outcome.output_len, len(outcome.itl)) == (None, 3, 2)


def test_a_stream_that_ends_with_its_connection(serve):
    parts = [b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", token(), token(reason="stop"), None]
    outcome = one(serve(lambda body, n: parts).url)
    assert (outcome.error, outcome.output_len) == (None, 2)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
FAULTS = {
    "429": ([whole(429, {"error": {"message": "too many"}}, "Busy")], "status 429 Busy: too many"),
    "500": ([whole(500, b"", "Internal Server Error")], "status 500 Internal Server Error"),
    "503 as text": ([whole(503, b"<html>", "Away")], "status 503 Away"),
    "404 of FastAPI": ([whole(404, {"detail": "Not Found"})], "status 404 Said: Not Found"),
    "a redirect": ([whole(302, b"")], "status 302 Said"),
    "closed at once": ([None], "closed the connection without an answer"),
    "reset at once": (["reset"], "closed the connection without an answer|connection failed"),
    "closed in the head": ([b"HTTP/1.1 200 OK\r\nContent", None], "closed the connection without an answer"),
    "closed in chunks": ([OK, chunk(token()), None], "closed the connection in the middle"),
    "reset in chunks": ([OK, chunk(token()), "reset"], "closed the connection in the middle|connection failed"),
    "closed in a body": ([HEAD, token(), None], "closed the connection in the middle"),
    "closed before the end": ([b"HTTP/1.1 200 OK\r\n\r\n", token(), None], "ended without [DONE]"),
    "no reason": (stream(token(), token()), "ended without [DONE]"),
    "no token": (stream(DONE), "a stream without a token"),
    "an empty stream": (stream(), "a stream without a token"),
    "only a speaker": (stream(ROLE, DONE), "a stream without a token"),
    "no stream": ([whole(200, {"choices": [{"text": "all of it"}]})], "a stream without a token"),
    "no JSON": (stream(token(), event(b"{nonsense")), "an event that is none of OpenAI's API: b'{nonsense'"),
    "other JSON": (stream(token(), event([1, 2])), "an event that is none of OpenAI's API: b'[1, 2]'"),
    "other types": (stream(event({"choices": "none"})), "an event that is none of OpenAI's API"),
    "not UTF-8": (stream(event(b'{"choices": [{"finish_reason": "\xff"}]}')), "an event that is none of OpenAI's API"),
    "an error": (
        stream(token(), event({"error": {"message": "engine is gone"}}), DONE),
        "an error in the stream: engine is",
    ),
    "no chunks": ([OK, b"zz\r\n"], "the size of a chunk is b'zz'"),
    "no HTTP": ([b"\x16\x03\x01 nonsense\r\n\r\n"], "no HTTP response"),
    "an endless line": ([b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"x" * (MOST + 1), 1], "an event of more than"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_counted_and_others_go_on(serve, fault):
    """The second of three requests fails; on the same connection, where that is kept."""
    parts, message = FAULTS[fault]
    bad = (1, 2) if "at once" in fault else (1,)  # a kept connection that ends without a byte: asked again on a new one
    server = serve(lambda body, n: parts if n in bad else answer(body))
    first, second, third = outcomes_of(server.url, 3, concurrency=1)[0]
    assert (first.error, third.error) == (None, None)
    assert any(part in second.error for part in message.split("|")), second.error
    assert "\n" not in second.error
    assert len(server.bodies()) == 2 + len(bad)


def test_silence_ends_with_the_timeout(serve):
    outcome, other = outcomes_of(serve(lambda b, n: [OK, 60] if n == 0 else answer(b)).url, 2, 1, timeout=0.3)[0]
    assert outcome.error == "no whole answer within --timeout"
    assert other.error is None


def test_a_trickle_ends_with_the_timeout(serve):
    parts = [OK, *[part for _ in range(400) for part in (chunk(token()), 0.05)]]
    assert one(serve(lambda body, n: parts).url, timeout=0.5).error == "no whole answer within --timeout"


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcomes, _ = outcomes_of(url, 3)
    assert [o.error for o in outcomes] == ["connection failed: Connection refused"] * 3


def test_a_server_that_dies(serve):
    """Everything after that fails, and all of it ends."""
    server = serve(lambda body, n: answer(body) if n < 4 else ["reset"])
    outcomes, kept = outcomes_of(server.url, 20, concurrency=2)
    assert [o.error is None for o in outcomes].count(True) == 4
    assert kept == 0


def test_connections_are_kept(serve):
    server = serve()
    outcomes, kept = outcomes_of(server.url, 30, concurrency=3)
    assert all(o.error is None for o in outcomes)
    assert (server.connections, kept, len(server.asked)) == (3, 3, 30)


def test_a_connection_closed_meanwhile_is_no_failure(serve):
    """Servers close what is idle: the next request takes a new connection, and is asked once."""
    server = serve(lambda body, n: [*answer(body), None])
    outcomes, _ = outcomes_of(server.url, 3, due=[0.0, 0.1, 0.2])
    assert [o.error for o in outcomes] == [None] * 3
    assert (server.connections, len(server.asked)) == (3, 3)


def test_a_kept_connection_that_is_dropped_late_is_a_failure(serve, monkeypatch):
    monkeypatch.setattr("aotc.loadtest.client.STALE_SECONDS", 0.1)
    server = serve(lambda body, n: answer(body) if n == 0 else [0.3, "reset"])
    first, second = outcomes_of(server.url, 2, concurrency=1)[0]
    assert first.error is None and second.error is not None
    assert len(server.bodies()) == 2


def test_concurrency(serve):
    def slow(body, n):
        return [0.02, *answer(body)]

    server = serve(slow)
    outcomes_of(server.url, 12, concurrency=4)
    assert server.most == 4
    server = serve(slow)
    outcomes_of(server.url, 12)
    assert server.most > 4


def test_requests_are_sent_when_they_are_due(serve):
    due = [0.0, 0.1, 0.3]
    outcomes, _ = outcomes_of(serve().url, 3, due=due)
    begin = outcomes[0].start
    assert all(o.start - begin >= at - 0.01 for o, at in zip(outcomes, due, strict=True))


def test_what_is_sent(serve):
    server = serve()

    async def run(url, key):
        client = Client(url, key)
        outcome = await ask(
            client, Asked(client.request("POST", "/v1/completions", {"max_tokens": 1, "prompt": "é"}), 1, 1)
        )
        client.close()
        return outcome

    assert asyncio.run(run(f"{server.url}/v1/", "secret")).error is None
    path, headers, body = server.asked[0]
    assert (path, body) == ("/v1/completions", {"max_tokens": 1, "prompt": "é"})
    assert headers["authorization"] == "Bearer secret" and headers["host"] == server.url.removeprefix("http://")
    assert asyncio.run(run(f"{server.url}/base", None)).error is None
    path, headers, _ = server.asked[1]
    assert path == "/base/v1/completions" and "authorization" not in headers


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999", "x:80"])
def test_what_is_no_address(url):
    with pytest.raises(RequestError, match="is no address of a server"):
        Client(url)


def test_the_key_is_no_place_for_headers():
    with pytest.raises(RequestError, match="--api-key"):
        Client("http://x", "a\r\nX-Other: 1")


def test_bodies_are_json():
    client = Client("http://x")
    head, _, body = client.request("POST", "/p", {"a": [1, "é"]}).partition(b"\r\n\r\n")
    assert json.loads(body) == {"a": [1, "é"]}
    assert b"Content-Length: %d" % len(body) in head and head.startswith(b"POST /p HTTP/1.1\r\nHost: x\r\n")
