"""Clients that leave or dawdle, engines that die, hang or talk nonsense, and the end of the server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import serving
from serving import alive, events, later, post, read, wait

from aotc.runtime.sampling import SamplingParams
from aotc.runtime.server import engine_client, watchdog

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error(response, status=503):
    """The message of an error object."""
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


# Clients


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_leaves_frees_its_slots(server, path, stream):
    before = len(server.log("cancel"))
    prompt = {"prompt": "slow"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "slow"}]}
    with server.connect(post(path, {**prompt, "max_tokens": 150, "n": 3, "stream": stream})) as connection:
        wait(lambda: server.engine.load.running == 3)
        if stream:
            read(connection, b"data: ")
    cancels = wait(lambda: len(server.log("cancel")) >= before + 3 and server.log("cancel")[before:])
    assert all(line["known"] for line in cancels) and [line["free"] for line in cancels] == [2, 3, 4]
    wait(lambda: server.engine.load.running == 0 and server.engine.unfinished == 0)  # and the gauges follow


def test_a_client_that_leaves_while_it_waits_is_never_run(fresh):
    running = fresh(seqs=1).wait_ready()
    first = later(running.complete, "slow", max_tokens=40)
    wait(lambda: running.engine.load.running == 1)
    with running.connect(post(COMPLETIONS, {"prompt": "waits"})):
        wait(lambda: running.submitted("waits"))
    (cancel,) = wait(lambda: running.log("cancel"))
    assert cancel["known"] and cancel["free"] == 0
    assert first().json()["usage"]["completion_tokens"] == 40
    assert running.metric("aotc:request_success_total", finished_reason="abort") == 1


def test_a_choice_that_fails_ends_the_others_of_its_request(server):
    before = len(server.log("cancel"))
    assert "no valid token" in error(server.complete(["nan:2", "slow"], max_tokens=150), 500)
    (cancel,) = wait(lambda: server.log("cancel")[before:])
    assert cancel["known"]


def test_a_stop_string_ends_the_work_too(server):
    before = len(server.log("cancel"))
    assert server.complete("slowly", max_tokens=150, stop="ly").json()["choices"][0]["text"] == "slow"
    (cancel,) = wait(lambda: server.log("cancel")[before:])
    assert cancel["known"]


def test_a_slow_reader_holds_up_nobody(fresh):
    """Its answer is far larger than what sockets and the server's buffer take in; it is whole all the same."""
    running = fresh(seqs=4)
    running.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    running.wait_ready()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(running.address)
        body = {"messages": [{"role": "user", "content": "dawdle"}], "stream": True, "n": 4, "logprobs": True}
        request = post(CHAT, {**body, "top_logprobs": 20, "temperature": 0}, {"Connection": "close"})
        connection.sendall(request)
        wait(lambda: running.submitted("dawdle") == 4 and running.engine.unfinished == 0)  # nothing was read
        assert [running.complete("abc", max_tokens=5).json()["choices"][0]["text"] for _ in range(3)] == ["abcab"] * 3
        data = read(connection)
    assert len(data) > 300_000 and data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert data.count(b'"finish_reason":"length"') == 4


def test_a_slow_reader_that_leaves(fresh):
    running = fresh()
    running.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    running.wait_ready()
    body = {"prompt": "slow", "stream": True, "logprobs": 20, "max_tokens": 190}
    with running.connect(post(COMPLETIONS, {**body, "n": 4})):
        wait(lambda: running.engine.load.running == 4)
    wait(lambda: len(running.log("cancel")) == 4 and running.engine.unfinished == 0)


def test_a_long_text_holds_up_nobody(server, monkeypatch):
    """Tokenizing and templates run beside the streams of others."""
    tokenizer, template, release = server.model.tokenizer, server.model.template, threading.Event()
    encode, render = tokenizer.encode, template.render
    begun = []

    def slow(function):
        def call(text, *arguments, **fields):
            if len(text) > 5000 or "held" in str(text):
                begun.append(text)
                assert release.wait(10)
            return function(text, *arguments, **fields)

        return call

    monkeypatch.setattr(tokenizer, "encode", slow(encode))
    monkeypatch.setattr(template, "render", slow(render))
    asked = [later(server.complete, "x" * 6000), later(server.chat, "held", max_tokens=4)]
    wait(lambda: len(begun) == 2)
    assert server.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    release.set()
    assert "6000 tokens" in error(asked[0](), 400)
    assert asked[1]().json()["choices"][0]["message"]["content"] == "held"


def test_small_writes_are_sent_at_once(server):
    """Else every answer would wait 40 ms for the client's acknowledgement of its head."""
    with server.connect(b"GET /health HTTP/1.1\r\n"):
        (connection, *_) = wait(lambda: list(server.http.server_state.connections))
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_streams_reach_the_client_token_by_token(server):
    with server.connect(post(COMPLETIONS, {"prompt": "slow:", "max_tokens": 100, "stream": True})) as connection:
        read(connection, b'"text":"o"')
        assert server.engine.unfinished == 1


def test_many_at_once(server):
    """More than there are slots, of all kinds, each with its own answer."""
    prompts = [f"prompt{n}x" for n in range(24)]
    asked = [later(server.complete, p, max_tokens=10 + n, stream=n % 2 == 1) for n, p in enumerate(prompts)]
    for n, (prompt, result) in enumerate(zip(prompts, asked, strict=True)):
        response = result()
        choices = [c["choices"][0] for c in events(response)] if n % 2 else response.json()["choices"]
        assert "".join(c["text"] for c in choices) == (prompt * 5)[: 10 + n]


# Engines


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies(fresh, monkeypatch, stream):
    """What it had begun fails, what it had not is answered by the next; readiness falls and returns."""
    monkeypatch.setattr(engine_client, "BACKOFF", (0.3,))
    running = fresh(seqs=1).wait_ready()
    victim = later(running.complete, "slow-die:9", max_tokens=20, stream=stream)
    wait(lambda: running.submitted("slow-die:9"))
    waiting = [later(running.complete, "after", max_tokens=8, stream=True), later(running.chat, "after", max_tokens=8)]
    wait(lambda: running.submitted("after") == 2)
    response = victim()
    assert running.client.get("/health").status_code == 503 and running.client.get("/health/live").status_code == 200
    if stream:
        *chunks, last = events(response)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "slow-die:"
        assert last["error"]["type"] == "server_error" and "failed while it answered" in last["error"]["message"]
    else:
        assert "failed while it answered" in error(response)
        assert response.headers["retry-after"] == "1"
    late = running.complete("late", max_tokens=4)  # asked while there was no engine
    assert late.json()["choices"][0]["text"] == "late"
    assert "".join(c["choices"][0]["text"] for c in events(waiting[0]())) == "afterafte"[:8]
    assert waiting[1]().json()["choices"][0]["message"]["content"] == "afterafte"[:8]
    running.wait_ready()
    assert len(running.log("start")) == 2 and running.metric("aotc:engine_restarts_total") == 1
    assert running.metric("aotc:request_success_total", finished_reason="error") == 1
    assert running.submitted("slow-die:9") == 1  # a request that was begun is not repeated


def test_what_was_begun_is_not_repeated_although_its_error_was_not_read_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    engine = engine_client.EngineClient(str(tmp_path), 4, [sys.executable, str(serving.FAKE)])
    ids = [ord(c) - 33 for c in "slow-die:3"]

    async def scenario():
        task = asyncio.create_task(engine.run())
        tokens = engine.generate(ids, SamplingParams(temperature=0), 0)
        assert (await anext(tokens)).token_id == ids[0]
        await engine.ready.wait()
        while len(serving.log_of(tmp_path, "start")) < 2 or not engine.ready.is_set():
            await asyncio.sleep(0.01)
        other = engine.generate([1], SamplingParams(temperature=0, max_tokens=1), 0)
        assert (await anext(other)).finish_reason == "length"
        rest = 0
        with pytest.raises(engine_client.EngineGone, match="failed while it answered"):
            async for _ in tokens:
                rest += 1
        assert rest == 2
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    assert len(serving.log_of(tmp_path, "submit")) == 2


def test_a_request_that_ends_every_engine_is_given_up(fresh, monkeypatch):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    running = fresh().wait_ready()
    assert "failed 2 times" in error(running.complete("kill:0"))
    assert running.submitted("kill:0") == 2
    assert running.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert len(running.log("start")) == 3


@pytest.mark.parametrize(("word", "code"), [("bug", 1), ("fault", 70)])
def test_an_exception_in_a_step(fresh, monkeypatch, caplog, word, code):
    """The engine ends rather than go on with what it does not know; the next one answers."""
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    running = fresh().wait_ready()
    assert "failed while it answered" in error(running.complete(f"{word}:2"))
    assert running.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert f"exit code {code}" in caplog.text and len(running.log("start")) == 2


def test_an_engine_that_does_not_start_is_tried_again_ever_later(fresh, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01, 0.02, 0.03))
    (tmp_path / "crash").touch()
    running = fresh()
    wait(lambda: len(running.log("start")) >= 4)
    assert running.client.get("/health").status_code == 503
    (tmp_path / "crash").unlink()
    running.wait_ready()
    waits = [r.args[0] for r in caplog.records if "starting another in" in r.msg]
    assert waits[:4] == [0.01, 0.02, 0.03, 0.03]
    assert running.metric("aotc:engine_restarts_total") == len(waits)


def test_an_engine_that_refuses_the_artifact_is_the_end(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    (tmp_path / "refuse").write_text("weights.bin is damaged: copy it again")
    running = fresh()
    early = later(running.complete, "early")
    wait(lambda: running.engine.failed)
    assert "weights.bin is damaged" in error(early())
    for path in ("/health", "/health/ready"):
        response = running.client.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "failed", "message": "weights.bin is damaged: copy it again"}
    for response in (running.complete("abc"), running.complete("abc", stream=True), running.chat("abc")):
        assert error(response) == "the engine cannot start: weights.bin is damaged: copy it again"
    assert running.client.get("/health/live").status_code == 200
    assert len(running.log("start")) == 1


def test_a_request_that_comes_after_the_end_does_not_wait(tmp_path):
    engine = engine_client.EngineClient(str(tmp_path), 4)
    engine.failed = "no artifact"
    with pytest.raises(engine_client.EngineGone, match="cannot start: no artifact"):
        asyncio.run(anext(engine.generate([1], SamplingParams(), 0)))


def test_an_artifact_that_is_damaged_while_the_server_runs(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    running = fresh(seqs=1).wait_ready()
    victim = later(running.complete, "slow-die:9")
    wait(lambda: running.submitted("slow-die:9"))
    unbegun = later(running.complete, "abc", stream=True)
    wait(lambda: running.submitted("abc"))
    (tmp_path / "refuse").write_text("no longer an artifact")
    assert "failed while it answered" in error(victim())
    (event,) = events(unbegun())
    assert event["error"]["message"] == "the engine cannot start: no longer an artifact"
    assert running.client.get("/health").json()["status"] == "failed" and len(running.log("start")) == 2


def test_a_device_that_is_lost_may_come_back(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    running = fresh().wait_ready()
    (tmp_path / "unplugged").write_text("no CUDA device")
    asked = later(running.complete, "die:0", max_tokens=3)
    wait(lambda: len(running.log("start")) >= 3)
    assert running.engine.failed is None
    (tmp_path / "unplugged").unlink()
    assert "failed 2 times" in error(asked())
    running.wait_ready()
    assert running.complete("abc", max_tokens=3).status_code == 200


def test_a_device_that_was_never_there(fresh, tmp_path):
    (tmp_path / "unplugged").write_text("no CUDA device")
    running = fresh()
    wait(lambda: running.engine.failed == "no CUDA device")
    assert len(running.log("start")) == 1


def test_a_hung_engine_is_ended_and_replaced(fresh, monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT", 0.25)
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    running = fresh().wait_ready()
    (hung,) = running.pids()
    assert running.complete("stuck", max_tokens=5).json()["choices"][0]["text"] == "stuck"
    assert not alive(hung) and len(running.log("start")) == 2
    time.sleep(1.2)
    assert len(running.log("start")) == 2  # one that has nothing to do is not silent


def test_an_engine_that_loads_for_ever_is_ended_and_replaced(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT", 0.2)
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    (tmp_path / "load").touch()
    running = fresh(load_timeout=3)
    assert running.complete("early", max_tokens=5).json()["choices"][0]["text"] == "early"
    assert not alive(running.pids()[0]) and len(running.log("start")) == 2


def test_a_server_that_was_held_up_does_not_blame_the_engine(fresh, monkeypatch):
    """The engine spoke all the time; only nobody listened."""
    monkeypatch.setattr(watchdog, "BEAT", 0.2)
    running = fresh().wait_ready()
    running.http_loop().call_soon_threadsafe(time.sleep, 1.2)
    assert running.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    time.sleep(0.3)
    assert len(running.log("start")) == 1


def test_a_wall_clock_that_jumps_changes_nothing(fresh, monkeypatch):
    running = fresh().wait_ready()
    asked = later(running.complete, "slow", max_tokens=30)
    wait(lambda: running.engine.load.running == 1)
    real = time.time
    for jump in (-(10**9), 10**9):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert running.complete("abc", max_tokens=3).status_code == 200
    assert asked().json()["choices"][0]["text"] == ("slow" * 8)[:30]
    assert len(running.log("start")) == 1


def test_a_long_step_that_was_announced_is_waited_for(fresh, monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT", 0.25)
    running = fresh().wait_ready()
    prompt = "nap" + "." * 50
    assert running.complete(prompt, max_tokens=4).json()["choices"][0]["text"] == "nap."
    assert len(running.log("start")) == 1


@pytest.mark.parametrize(
    "garbage",
    [b"\x03\0\0\0abc", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\0\0\0\x90", b"\x07\0\0\0\x81\xa4type\xa1"],
    ids=["no_msgpack", "huge", "empty", "no_object", "no_such_message"],
)
def test_garbled_frames_end_the_engine_not_the_server(fresh, tmp_path, monkeypatch, garbage):
    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    monkeypatch.setattr(engine_client, "GRACE", 0.1)
    (tmp_path / "babble").write_bytes(garbage)
    running = fresh()
    assert running.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert len(running.log("start")) == 2 and not alive(running.pids()[0])


def test_an_engine_that_cannot_be_started_for_want_of_memory(fresh, monkeypatch):
    real, calls = subprocess.Popen, []

    def popen(*arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            raise OSError(12, "Cannot allocate memory")
        return real(*arguments, **options)

    monkeypatch.setattr(engine_client, "BACKOFF", (0.01,))
    monkeypatch.setattr(engine_client.subprocess, "Popen", popen)
    fresh().wait_ready()
    assert len(calls) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_nan_logits_give_an_error_and_no_text(server, stream):
    before = server.metric("aotc:request_success_total", finished_reason="error")
    neighbour = later(server.complete, "slow", max_tokens=20)
    response = server.complete("nan:0", max_tokens=20, stream=stream)
    if stream:
        (event,) = events(response)
        assert event["error"]["type"] == "server_error" and "NaN" in event["error"]["message"]
    else:
        assert "NaN" in error(response, 500)
    response = server.complete("nan:3", max_tokens=20, stream=True)
    assert "".join(c["choices"][0]["text"] for c in events(response)[:-1]) == "nan"
    assert neighbour().json()["choices"][0]["text"] == "slow" * 5
    assert server.metric("aotc:request_success_total", finished_reason="error") == before + 2
    assert len(server.log("start")) == 1


# The end


def test_sigterm_lets_streams_finish(process):
    server, address, engine = process
    with socket.create_connection(address) as stream, socket.create_connection(address) as whole:
        stream.sendall(post(COMPLETIONS, {"prompt": "slow", "max_tokens": 20, "stream": True, "temperature": 0}))
        whole.sendall(post(COMPLETIONS, {"prompt": "slow", "max_tokens": 20, "temperature": 0}))
        begun = read(stream, b'"text":"w"')
        server.send_signal(signal.SIGTERM)
        os.kill(engine, signal.SIGTERM)  # systemd sends it to the whole group
        data = begun + read(stream)
        assert data.count(b'"text":"') == 20 and b"data: [DONE]" in data
        assert b'"text":"' + b"slow" * 5 + b'"' in read(whole)
    assert server.wait(10) == -signal.SIGTERM
    assert not alive(engine)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_second_signal_ends_the_server_at_once(process):
    server, address, engine = process
    with socket.create_connection(address) as stream:
        stream.sendall(post(COMPLETIONS, {"prompt": "stuck", "stream": True}))
        read(stream, b"HTTP/1.1 200")
        server.send_signal(signal.SIGTERM)
        wait(lambda: refused(address))
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == -signal.SIGINT
    wait(lambda: not alive(engine))


def refused(address):
    try:
        socket.create_connection(address).close()
        return False
    except ConnectionRefusedError:
        return True


def test_no_new_work_while_the_server_drains(fresh):
    running = fresh().wait_ready()
    running.server.draining = True
    assert "shutting down" in error(running.complete("abc"))
    assert running.client.get("/health").status_code == 503 and running.client.get("/health/live").status_code == 200


def test_answers_that_take_too_long_are_cut_off(fresh, monkeypatch):
    monkeypatch.setattr(engine_client, "GRACE", 0.1)
    running = fresh(shutdown=0).wait_ready()
    asked = [running.connect(post(COMPLETIONS, {"prompt": "slow", "max_tokens": 190, "stream": s})) for s in (0, 1)]
    asked += [running.connect(post(COMPLETIONS, {"prompt": "stuck", "stream": True}))]
    wait(lambda: running.submitted("stuck"))
    running.http.handle_exit(signal.SIGTERM, None)
    running.thread.join(10)
    assert not running.thread.is_alive() and not alive(running.pids()[0])
    for connection in asked:
        connection.close()


@pytest.mark.parametrize("prompt", [None, "slow", "stuck"])
def test_the_engine_ends_with_a_killed_server(process, prompt):
    server, address, engine = process
    with socket.create_connection(address) as connection:
        if prompt:
            connection.sendall(post(COMPLETIONS, {"prompt": prompt, "max_tokens": 190, "stream": True}))
            read(connection, b"HTTP/1.1 200")
            time.sleep(0.1)
        server.kill()
        wait(lambda: not alive(engine))
