"""Clients that take their time or vanish, bursts, queues of ten thousand, and servers that end in the midst of it."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import serving
from serving import alive, later, post, read, wait

import aotc.runtime.server
from aotc.runtime.server import answer, connection
from aotc.runtime.server.connection import Writer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "dawdle"}], "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}


def small_buffers(running):
    running.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return running.wait_ready()


def unread(running, body):
    """A connection that asks and does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(running.address)
    client.sendall(post(CHAT, body))
    return client


def test_what_waits_for_a_slow_reader_is_bounded(fresh, monkeypatch):
    """Its answer is given up, its slots are free; it hears why when it reads on."""
    monkeypatch.setattr(answer, "MAX_UNSENT", 20_000)
    running = small_buffers(fresh())
    with unread(running, LONG) as client:
        wait(lambda: running.submitted("dawdle") == 4 and running.engine.unfinished == 0)
        assert running.complete("abc", max_tokens=5).json()["choices"][0]["text"] == "abcab"
        data = read(client, b"[DONE]")
    assert b"reads its answer too slowly" in data and len(data) < 300_000
    assert running.server.served["fake"].breaker._failures == 0  # not our fault


def test_a_reader_that_stopped_is_cut_off(fresh, monkeypatch):
    """As a peer behind a dead link is: nothing that was sent is ever taken."""
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.3)
    running = small_buffers(fresh())
    with unread(running, LONG):
        wait(lambda: running.submitted("dawdle") == 4)
        wait(lambda: not running.http.server_state.tasks)  # the handler ended, although the client is still there
    assert running.complete("abc", max_tokens=5).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
@pytest.mark.parametrize("after", [False, True])
def test_a_head_that_does_not_come(fresh, monkeypatch, sent, after):
    """Also on a connection that was used before: a few bytes do not keep it for ever."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    running = fresh().wait_ready()
    if after and not sent:
        running.http.config.timeout_keep_alive = 0.3
    with running.connect(*[b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"] * after) as client:
        if after:
            read(client, b'{"status":"live"}')
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""


def test_a_head_in_small_pieces_is_in_time(fresh, monkeypatch):
    running = fresh().wait_ready()
    with running.connect() as client:
        for byte in b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n":
            client.sendall(bytes([byte]))
        assert read(client, b'{"status":"live"}').startswith(b"HTTP/1.1 200")
        (kept,) = [c for c in running.http.server_state.connections if c.client == client.getsockname()]
        wait(lambda: kept.cycle.response_complete)
        assert kept._head is None


def test_peers_that_vanish_are_looked_for(fresh):
    """The kernel asks idle connections whether they live: what is set on the listening socket holds for each."""
    running = fresh().wait_ready()
    with running.connect(b"GET /health HTTP/1.1\r\n"):
        (one, *_) = wait(lambda: [c for c in running.http.server_state.connections])
        raw = one.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


class Transport:
    def __init__(self):
        self.sent = []

    def write(self, data):
        self.sent.append(bytes(data))

    def close(self):
        self.sent.append(None)


def test_a_head_leaves_with_its_body_or_with_the_next_turn():
    async def scenario():
        inner = Transport()
        writer = Writer(inner, asyncio.get_running_loop())
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.write(b"{}")
        writer.write(b"")
        writer.write(b"more")
        await asyncio.sleep(0)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        assert inner.sent == [b"HTTP/1.1 200 OK\r\n\r\n{}", b"more"]
        await asyncio.sleep(0)
        assert inner.sent[2:] == [b"HTTP/1.1 200 OK\r\n\r\n"]
        writer.write(b"HTTP/1.1 400 \r\n\r\n")
        writer.close()
        await asyncio.sleep(0)
        assert inner.sent[3:] == [b"HTTP/1.1 400 \r\n\r\n", None]

    asyncio.run(scenario())


def test_a_burst_does_not_overrun_the_queue(fresh):
    """Requests that come in one turn of the loop see each other."""
    running = fresh(queue=3, seqs=1).wait_ready()
    held = running.http_loop()
    go, stopped = threading.Event(), threading.Event()
    held.call_soon_threadsafe(lambda: (stopped.set(), go.wait(10)))
    assert stopped.wait(10)
    body = {"prompt": "slow", "max_tokens": 60, "stream": True}
    clients = [running.connect(post(COMPLETIONS, body)) for _ in range(12)]
    go.set()
    first = [client.recv(12) for client in clients]
    assert first.count(b"HTTP/1.1 200") == 3 and first.count(b"HTTP/1.1 429") == 9
    for client in clients:
        client.close()
    wait(lambda: running.engine.unfinished == 0)
    assert running.model.starting == 0 and running.complete("abc", n=3, max_tokens=2).status_code == 200


def test_ten_thousand_queued_requests(fresh):
    """All are answered, each with its own answer; and when their clients leave, they are gone."""
    running = fresh(queue=20_000, seqs=64).wait_ready()
    prompts = [f"x{n}y" for n in range(64)]
    asked = [later(running.complete, prompts, n=16, max_tokens=4) for _ in range(10)]
    wait(lambda: running.engine.load.waiting > 5000, 30)
    assert running.client.get("/health").status_code == 200 and running.metric("aotc:num_requests_waiting") > 1000
    for result in asked:
        choices = result(60).json()["choices"]
        assert [c["text"] for c in choices] == [(p * 2)[:4] for p in prompts for _ in range(16)]
    running.complete("abc", max_tokens=2)
    assert running.engine.unfinished == running.model.starting == 0
    leaving = [running.connect(post(COMPLETIONS, {"prompt": ["leaving"] * 64, "n": 16, "max_tokens": 190})) for _ in range(10)]
    wait(lambda: running.engine.unfinished > 9000, 30)
    for client in leaving:
        client.close()
    assert running.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    wait(lambda: running.engine.load.running == running.engine.load.waiting == running.engine.unfinished == 0, 30)


def ask_for_ever(address, name, results, stop):
    """One request after the other until the server is gone; notes how each one ended, by its prompt."""
    for number in range(1000):
        if stop.is_set():
            return
        prompt = f"slow{name}.{number}"
        body = {"prompt": prompt, "max_tokens": len(prompt), "temperature": 0}
        try:
            client = socket.create_connection(address, timeout=10)
        except ConnectionRefusedError:
            return
        with client:
            try:
                client.sendall(post(COMPLETIONS, body, {"Connection": "close"}))
                data = read(client)
            except ConnectionError:  # it connected to a port that was closed before anybody took it in
                data = b""
        head, _, text = data.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 200") and json.loads(text)["choices"][0]["text"] == prompt:
            results[prompt] = "answered"
        else:
            results[prompt] = "told" if head.startswith(b"HTTP/1.1 503") and b"shutting down" in text else data


def test_sigterm_under_load_loses_no_request(process, tmp_path):
    """Each is answered, or told to go elsewhere, or never got in: what the engine was asked, the client was told."""
    server, address, engine = process
    results, stop = {}, threading.Event()
    threads = [threading.Thread(target=ask_for_ever, args=(address, n, results, stop)) for n in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait(lambda: list(results.values()).count("answered") >= 12)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == -signal.SIGTERM
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert set(results.values()) <= {"answered", "told", b""}, results
    assert list(results.values()).count(b"") <= 8  # at most the last one of each
    begun = {line["prompt"] for line in serving.log_of(tmp_path, "submit")}
    assert begun == {prompt for prompt, end in results.items() if end == "answered"} and not alive(engine)


def test_a_killed_server_starts_again_on_its_port(process, tmp_path):
    """Neither the port nor the engine is held by what was."""
    server, address, engine = process
    with socket.create_connection(address) as client:
        client.sendall(post(COMPLETIONS, {"prompt": "slow", "max_tokens": 190, "stream": True}))
        read(client, b"data: ")
        server.kill()
        server.wait()
        command = [sys.executable, serving.__file__, str(tmp_path), str(tmp_path / "tokenizer.json"), str(address[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as again:
            try:
                assert int(again.stdout.readline()) == address[1]
                with socket.create_connection(address) as other:
                    other.sendall(post(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "temperature": 0}))
                    assert b'"text":"abc"' in read(other, b"}}")
                wait(lambda: not alive(engine))
            finally:
                again.kill()


def test_the_wall_clock_is_for_showing_only():
    """Whatever is waited for or measured goes by the monotonic clock."""
    folder = Path(aotc.runtime.server.__file__).parent
    found = {f.name: len(re.findall(r"\btime\.time\(|\bdatetime\b", f.read_text())) for f in folder.glob("*.py")}
    assert {name for name, count in found.items() if count} == {"protocol.py"} and found["protocol.py"] == 1
