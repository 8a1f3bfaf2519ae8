"""The engine's own process: `python -m aotc.runtime.server.engine_process FD ARTIFACT MAX_NUM_SEQS DEVICE
KV_LAYOUT KV_CACHE_MEMORY`; the last two may be empty.

A hung step or a broken device can only be cured by a new process: the server starts one when this one dies. Exit codes:
0 when the server is gone, 1 when it sends what is no message, 2 when the model does not load, 70 when the device failed
in a step.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aotc.errors import AotcError, DeviceError, DeviceLostError, OverloadedError, RequestError
from aotc.runtime.engine import Engine
from aotc.runtime.sequence import Request
from aotc.runtime.server.engine_meter import EngineMeter
from aotc.runtime.server.messages import (
    Alive,
    Cancel,
    Message,
    Outputs,
    Ready,
    Refused,
    Submit,
    Unusable,
    messages,
    pack,
    params_from_dict,
)

if TYPE_CHECKING:
    from aotc.runtime.devices.cuda import CudaDevice

HEARTBEAT = 0.5  # seconds
LONG_STEP = 32  # tokens; a longer step is announced
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Garbled(AotcError):
    """The server sent what is no message: nothing that comes after it can be understood."""

    exit_code = 1


class Channel:
    """Frames over a socket. Reading never blocks beyond `timeout` seconds."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, bytearray()

    def send(self, message: Message) -> None:
        self._socket.sendall(pack(message))

    def receive(self, timeout: float) -> Iterator[Message]:
        """Every whole message at hand. Raises EOFError when the other end is gone, and Garbled."""
        readable, _, _ = select.select([self._socket], [], [], timeout)
        if readable:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data
        try:
            yield from messages(self._buffer)
        except ValueError as error:  # msgspec's errors too
            raise Garbled(f"the server sent what is no message ({error}): this engine ends") from None

    def close(self) -> None:
        self._socket.close()


def belong_to_server() -> None:
    """Makes this process end with the server and not before it.

    A terminal and systemd send their signals to both: the server decides what becomes of requests in flight. When it
    is gone, the kernel kills this process, also in the middle of a step that never returns.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class GpuMemory:
    """The bytes of a GPU, of which other processes take some, too. Asked for now and then; None has none."""

    def __init__(self, device: CudaDevice | None) -> None:
        self._device, self._asked = device, -HEARTBEAT

    def news(self) -> dict[str, int]:
        """`device_used` and `device_total`; nothing where it was asked a moment ago."""
        now = time.monotonic()
        if self._device is None or now - self._asked < HEARTBEAT:
            return {}
        self._asked = now
        free, total = self._device.call("cuMemGetInfo")
        return {"device_used": int(total - free), "device_total": int(total)}


def serve(engine: Engine, channel: Channel, memory: GpuMemory) -> None:
    """Steps while there is work, takes messages between steps. Ends with EOFError when the server is gone."""
    meter, said = EngineMeter(engine), 0.0
    while True:
        for message in channel.receive(engine.slack if engine.has_work else HEARTBEAT):
            _take(engine, meter, channel, message)
        if engine.has_work and engine.slack > 0:  # who comes in this time is in the next step
            continue
        tokens = engine.scheduler.next_tokens
        if tokens > LONG_STEP or time.monotonic() - said > HEARTBEAT:
            channel.send(Alive(meter.load(), tokens, memory.news()))
            said = time.monotonic()
        outputs = meter.step() if engine.has_work else []
        if outputs:
            channel.send(Outputs(outputs, meter.load()))


def _take(engine: Engine, meter: EngineMeter, channel: Channel, message: Message) -> None:
    if isinstance(message, Cancel):
        meter.cancelled(message.request_id)
        engine.cancel(message.request_id)
    elif isinstance(message, Submit):
        try:
            engine.submit(_request(message))
            meter.submitted(message.request_id)
        except OverloadedError as error:
            channel.send(Refused(message.request_id, str(error), error.retry_after))
        except RequestError as error:
            channel.send(Refused(message.request_id, str(error)))


def _request(message: Submit) -> Request:
    deadline = None if message.timeout is None else time.monotonic() + message.timeout
    return Request(
        message.request_id, tuple(message.prompt_token_ids), params_from_dict(message.params), message.seed,
        message.choice, message.priority, deadline, message.cache_salt,
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    from aotc.artifact.reader import open_artifact
    from aotc.runtime.devices.opening import begin_opening
    from aotc.runtime.executor import CacheOptions, open_executor

    belong_to_server()
    descriptor, path, seqs, kind = int(arguments[0]), arguments[1], int(arguments[2]), arguments[3]
    layout, memory = (*arguments[4:], "", "")[:2]
    channel = Channel(socket.socket(fileno=descriptor))
    opening = begin_opening(path, kind)
    try:
        executor = open_executor(open_artifact(path), seqs, kind, opening, CacheOptions(layout or None, memory or None, "paged"))
        executor.warm()
    except AotcError as error:
        channel.send(Unusable(str(error), isinstance(error, DeviceError)))
        return 2
    engine = Engine(executor, executor.model.eos_token_ids)
    memory = GpuMemory(getattr(executor, "device", None))
    purposes = {k: int(v) for k, v in vars(executor.memory).items()}
    channel.send(Ready({**purposes, **memory.news()}))
    return serve_to_the_end(engine, channel, memory)


def serve_to_the_end(engine: Engine, channel: Channel, memory: GpuMemory) -> int:
    """Serves until the server is gone or talks nonsense, or the device fails; the exit code. Tokens of a failed step are
    never sent."""
    try:
        serve(engine, channel, memory)
    except (DeviceLostError, Garbled) as error:
        print(f"aotc: error: {error}", file=sys.stderr)
        return error.exit_code
    except (EOFError, ConnectionError):
        pass
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # worker threads of the pool never end by themselves
