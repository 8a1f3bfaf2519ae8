"""The engine's own process: `python -m aotc.runtime.server.engine_process FD ARTIFACT MAX_NUM_SEQS`.

A hung step or a broken device can only be cured by a new process: the server starts one when this one dies.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

from aotc.errors import AotcError, RequestError
from aotc.runtime.engine import Engine
from aotc.runtime.sequence import Request
from aotc.runtime.server.messages import (
    MAX_FRAME,
    Alive,
    Cancel,
    Message,
    Outputs,
    Ready,
    Refused,
    Submit,
    pack,
    params_from_dict,
    unpack,
)

EXIT_DEVICE, EXIT_ARTIFACT = 70, 2


class Channel:
    """Frames over a socket. Reading never blocks beyond `timeout` seconds."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, bytearray()

    def send(self, message: Message) -> None:
        self._socket.sendall(pack(message))

    def receive(self, timeout: float) -> Iterator[Message]:
        """Every whole message at hand. Raises EOFError when the other end is gone."""
        readable, _, _ = select.select([self._socket], [], [], timeout)
        if readable:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "little")
            if length > MAX_FRAME:
                raise EOFError
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            yield unpack(body)


def serve(engine: Engine, channel: Channel, max_num_seqs: int) -> None:
    """Steps while there is work, takes messages between steps. Ends with EOFError when the server is gone."""
    steps, said = 0, 0.0
    while True:
        for message in channel.receive(0.0 if engine.has_work else 0.5):
            _take(engine, channel, message)
        outputs = engine.step() if engine.has_work else []
        steps += bool(outputs)
        if outputs:
            scheduler = engine.scheduler
            usage = 1 - scheduler.free_slots / max_num_seqs
            channel.send(Outputs(outputs, len(scheduler.running), len(scheduler.waiting), usage))
        now = time.monotonic()
        if now - said > 0.5:
            channel.send(Alive(steps))
            said = now


def _take(engine: Engine, channel: Channel, message: Message) -> None:
    if isinstance(message, Cancel):
        engine.cancel(message.request_id)
    elif isinstance(message, Submit):
        try:
            params = params_from_dict(message.params)
            ids = tuple(message.prompt_token_ids)
            engine.submit(Request(message.request_id, ids, params, message.seed, message.choice))
        except RequestError as error:
            channel.send(Refused(message.request_id, str(error)))


def main(arguments: list[str]) -> int:
    from aotc.artifact.reader import open_artifact
    from aotc.runtime.executor import CpuExecutor

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both: the server decides
    descriptor, path, seqs = int(arguments[0]), arguments[1], int(arguments[2])
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        executor = CpuExecutor(open_artifact(path), seqs)
        executor.warm()
    except AotcError as error:
        print(f"aotc: error: {error}", file=sys.stderr)
        return EXIT_ARTIFACT
    engine = Engine(executor, executor.model.eos_token_ids)
    channel.send(Ready({k: int(v) for k, v in vars(executor.memory).items()}))
    try:
        serve(engine, channel, executor.max_num_seqs)
    except (EOFError, ConnectionError):
        return 0
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # worker threads of the pool never end by themselves
