"""What comes over a connection besides plain requests: pipelines, offers of other protocols, and what is no HTTP."""

import contextlib
import json

import pytest
from serving import post, read, wait

COMPLETIONS = "/v1/completions"
ASK = post(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "temperature": 0})
LAST = post(COMPLETIONS, {"prompt": "xyz", "max_tokens": 3, "temperature": 0}, {"Connection": "close"})
CHUNKED = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def texts(data):
    """The statuses and texts of the answers in what a connection received."""
    heads, bodies = [], []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        heads.append(int(head.split()[1]))
        bodies.append(json.loads(data[:length])["choices"][0]["text"] if heads[-1] == 200 else data[:length].decode())
        data = data[length:]
    return list(zip(heads, bodies, strict=True))


@pytest.fixture
def answers(server):
    def get(*parts):
        with server.connect(*parts) as connection:
            return texts(read(connection))

    return get


def test_requests_one_after_the_other_without_waiting(answers):
    assert answers(ASK + ASK + LAST) == [(200, "abc"), (200, "abc"), (200, "xyz")]
    assert answers(ASK[:-9], ASK[-9:] + LAST[:50], LAST[50:]) == [(200, "abc"), (200, "xyz")]


@pytest.mark.parametrize("cut", [-30, -3, None])
def test_an_offer_to_speak_http2_is_not_taken(answers, cut):
    """Clients of Java make it with every first request; its body is HTTP/1.1, and so is what follows."""
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
    offer = post(COMPLETIONS, body, {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AA"})
    assert answers(offer[:cut], offer[len(offer[:cut]) :] + LAST) == [(200, "abc"), (200, "xyz")]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", 400), (b"HTTP/1.1\r\nHost: a\r\nHost: a\r\n", 400), (b"HTTP/1.0\r\n", 200),
        (b"HTTP/1.0\r\nHost: a\r\nHost: b\r\n", 400), (b"HTTP/1.1\r\nHost: \r\n", 200), (b"HTTP/3.7\r\nHost: a\r\n", 400),
        (b"HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n", 400), (b"HTTP/1.1\r\nHost: a\r\nX : a\r\n", 400),
        (b"HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n", 400),
        (b"HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400),
    ],
)  # fmt: skip
def test_heads(server, head, status):
    with server.connect(b"GET /health/live " + head + b"Connection: close\r\n\r\n") as connection:
        assert read(connection).startswith(b"HTTP/1.1 %d " % status)


ENDLESS = {
    "path": (b"GET /", b"a"),
    "name": (b"GET / HTTP/1.1\r\n", b"a"),
    "value": (b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"a"),
    "headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n"),
    "extension": (CHUNKED + b"1;", b"a"),
    "trailers": (CHUNKED + b"0\r\n", b"A: b\r\n"),
    "empty lines": (b"", b"\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_cut_off(server, name):
    begin, part = ENDLESS[name]
    with server.connect(begin) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.settimeout(5)
        for _ in range(300):  # far more than any buffer of the kernel
            connection.sendall(part * (1 << 15))
        pytest.fail("all of it was taken")
    assert server.complete("abc").status_code == 200


def test_trailers_are_no_headers(server):
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    sent = CHUNKED + b"%x\r\n%s\r\n0\r\nX-Request-Id: trailer\r\nConnection: close\r\n\r\n" % (len(body), body)
    with server.connect(sent) as connection:
        data = read(connection, b'"usage"')
    assert data.startswith(b"HTTP/1.1 200") and b"trailer" not in data


def test_a_length_that_is_too_small(answers):
    """The request is answered, and what is left of its body is no other one."""
    assert answers(ASK + b"}") == [(200, "abc")]
    assert answers(ASK + b"GARBAGE / HTTP/1.1\r\n\r\n") == [(200, "abc")]


def test_what_is_no_http_is_not_answered_into_a_stream(server):
    whole = post(COMPLETIONS, {"prompt": "slow", "max_tokens": 8, "temperature": 0, "stream": True})
    with server.connect(whole) as connection:
        data = connection.recv(1 << 16)
        connection.sendall(b"\0\1\2 nonsense\r\n\r\n")
        data += read(connection)
    assert data.count(b"HTTP/1.1 ") == 1 and data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_body_that_becomes_nonsense(server):
    with server.connect(CHUNKED + b"3\r\nabc\r\n", b"nonsense\r\n") as connection:
        assert read(connection).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_leaves_a_pipeline(server):
    """None of its requests goes on, the one under way least of all."""
    prompt = "slow pipeline"
    one = post(COMPLETIONS, {"prompt": prompt, "max_tokens": 150, "ignore_eos": True})
    with server.connect(one + one + one):
        wait(lambda: server.submitted(prompt) == 1)
    wait(lambda: server.engine.unfinished == 0, 1.0)
    assert server.submitted(prompt) == 1


def test_streams_for_old_clients_end_with_the_connection(server):
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with server.connect(head + body) as connection:
        head, _, data = read(connection).partition(b"\r\n\r\n")
    assert b"chunked" not in head and data.startswith(b"data: {") and data.endswith(b"data: [DONE]\n\n")
    with server.connect(b"GET /health/live HTTP/1.0\r\n\r\n") as connection:
        head, _, data = read(connection).partition(b"\r\n\r\n")
    assert b"content-length: 17" in head and data == b'{"status":"live"}'
