"""Framing of responses and events: the same whatever pieces the bytes arrive in, and refused where it is broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotc.loadtest.streams import MOST, EventParser, ResponseParser, StreamError

BODY = b"data: one\n\ndata: two\r\n\r\n"
RESPONSES = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\ndata:\r\n13\r\n one\n\ndata: two\r\n\r\n\r\n"
    b"0\r\nTrailer: z\r\n\r\n",
    "counted": b"HTTP/1.1 200 OK\r\ncontent-length:24\r\n\r\n" + BODY,
    "until close": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "after an interim one": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Length: 24\r\n\r\n" + BODY,
}
REUSABLE = {"chunked": True, "counted": True, "until close": False, "after an interim one": True}


@pytest.mark.parametrize("name", RESPONSES)
@given(cuts=st.lists(st.integers(0, 100), max_size=12))
def test_any_pieces(name, cuts):
    data, parser = RESPONSES[name], ResponseParser()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    body = b"".join(parser.feed(data[a:b]) for a, b in zip([0, *ends], ends, strict=False))
    assert parser.complete == (name != "until close")
    parser.end()
    assert (parser.status, body, parser.complete, parser.reusable) == (200, BODY, True, REUSABLE[name])


@given(
    events=st.lists(st.lists(st.binary(max_size=20).filter(lambda b: not {10, 13} & {*b}), min_size=1, max_size=3)),
    cuts=st.lists(st.integers(0, 300), max_size=20), gap=st.sampled_from([b"\n", b"\r\n"]),
    blank=st.sampled_from([b"", b" "]),
)  # fmt: skip
def test_events_in_any_pieces(events, cuts, gap, blank):
    # A blank after the colon is none of the data; without one, data that begins with one would lose it.
    wanted = [[part if blank or not part.startswith(b" ") else b"x" + part for part in event] for event in events]
    data = b": comment" + gap
    for event in wanted:
        data += (
            b"event: message" + gap + b"".join(b"data:" + blank + part + gap for part in event) + b"id: 3" + gap + gap
        )
    parser, ends = EventParser(), sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    found = [e for a, b in zip([0, *ends], ends, strict=False) for e in parser.feed(data[a:b])]
    assert found + parser.end() == [b"\n".join(event) for event in wanted]


def test_the_last_event_needs_no_blank_line():
    parser = EventParser()
    assert parser.feed(b"data: one\n\ndata: [DO") == [b"one"]
    assert parser.feed(b"NE]") == []
    assert parser.end() == [b"[DONE]"]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "no HTTP response: 'SSH-2.0-OpenSSH_9'"),
        (b"HTTP/1.1 20x OK\r\n\r\n", "no HTTP response: 'HTTP/1.1 20x OK'"),
        (b"HTTP/2 200\r\n\r\n", "no HTTP response: 'HTTP/2 200'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", "Content-Length is '-4'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "the size of a chunk is b'xyz'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\n", "the size of a chunk is b'-3'"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
            "a chunk is longer than its size: b'cd'",
        ),
        (b"x" * (MOST + 1), "a head of more than"),
    ],
)
def test_what_is_no_response(data, message):
    with pytest.raises(StreamError) as error:
        ResponseParser().feed(data)
    assert message in str(error.value)


def test_an_endless_event():
    with pytest.raises(StreamError, match="an event of more than"):
        EventParser().feed(b"data: " + b"x" * MOST)


@pytest.mark.parametrize("data", ["", "HTTP/1.1 200 OK\r\n"])
def test_closed_before_the_head(data):
    parser = ResponseParser()
    parser.feed(data.encode())
    with pytest.raises(StreamError, match="without an answer"):
        parser.end()


@pytest.mark.parametrize("head", ["Content-Length: 5", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("body", [b"", b"3\r\n"])
def test_closed_in_the_middle(head, body):
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (head.encode(), body))
    with pytest.raises(StreamError, match="in the middle of its answer"):
        parser.end()


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0", True),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive", True),
        ("HTTP/1.1 204 No Content", True),
    ],
)
def test_whether_a_connection_is_kept(head, reusable):
    parser = ResponseParser()
    assert parser.feed(f"{head}\r\n\r\n".encode()) == b""
    assert (parser.complete, parser.reusable) == (True, reusable)


def test_more_than_the_answer():
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabcd") == b"ab"
    assert parser.complete and not parser.reusable
