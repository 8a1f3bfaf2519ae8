"""What the engine's process does with bytes from the server that are no messages."""

import socket

import pytest
from fake_engine import FakeExecutor

from aotc.runtime.engine import Engine
from aotc.runtime.server.engine_process import Channel, GpuMemory, serve_to_the_end
from aotc.runtime.server.messages import MAX_FRAME, Cancel, pack


def frame(body):
    return len(body).to_bytes(4, "little") + body


GARBLED = {
    "too long": ((MAX_FRAME + 1).to_bytes(4, "little"), "a frame of 67108865 bytes"),
    "no msgpack": (frame(b"\xc1"), "MessagePack data is malformed"),
    "another message": (frame(b"\x81\xa4type\xa4what"), "Invalid value 'what'"),
}


@pytest.mark.parametrize("kind", GARBLED)
def test_what_is_no_message_ends_the_engine_in_one_line(kind, tmp_path, capsys):
    data, why = GARBLED[kind]
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(pack(Cancel("nobody")) + data + pack(Cancel("nobody")))
        ours.settimeout(30)
        code = serve_to_the_end(Engine(FakeExecutor(tmp_path, 1), ()), Channel(theirs), GpuMemory(None))
        said = capsys.readouterr()
        assert code == 1 and said.out == ""
        (line,) = said.err.splitlines()
        assert line.startswith(f"aotc: error: the server sent what is no message ({why}") and line.endswith("this engine ends")
        while read(ours):  # until the connection is closed
            pass
        assert theirs.fileno() == -1


def read(connection):
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_server_that_is_gone_ends_the_engine_without_a_word(tmp_path, capsys):
    ours, theirs = socket.socketpair()
    ours.close()
    assert serve_to_the_end(Engine(FakeExecutor(tmp_path, 1), ()), Channel(theirs), GpuMemory(None)) == 0
    assert capsys.readouterr() == ("", "") and theirs.fileno() == -1
