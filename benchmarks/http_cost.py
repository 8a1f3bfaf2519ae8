"""What HTTP costs: `python -m benchmarks.http_cost [--seconds S] [--json FILE]`.

A model that takes no time (it echoes its prompt) behind `aotc serve`'s own parts, each in a process of its own: this
one asks, one serves, one is the engine. Printed are

- latency: one request after the other for one token, over one connection, and what of it is the engine's channel
- stream: microseconds a token of one stream, from its first to its last, and the server's CPU time of a token
- requests: short requests a second over 32 connections, and the server's CPU time of a request

On a machine that does other things at the same time, CPU times are the figures to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MODULE = "benchmarks.http_cost"
VOCAB, MAX_LEN, STREAM = 256, 4096, 4000
CONNECTIONS = 32


class EchoExecutor:
    """A device that answers at once with the prompt's first token."""

    max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size = 64, 8192, MAX_LEN, VOCAB
    num_pages = page_size = page_bytes = offload_memory = 0
    runs_ahead = False

    def __init__(self) -> None:
        self.token = np.zeros(64, np.int32)
        self.logprobs, self.logprob_ids = np.zeros((64, 21), np.float32), np.zeros((64, 21), np.int32)

    def start(self, sequence: Any) -> None:
        pass

    def wait(self, step: EchoExecutor) -> EchoExecutor:
        return step

    def launch(self, rows: list[Any]) -> EchoExecutor:
        for n, row in enumerate(rows):
            self.token[n] = row.sequence.tokens[0]
        return self


def engine(descriptor: int) -> int:
    """The engine's process."""
    from aotc.runtime.engine import Engine
    from aotc.runtime.server.engine_process import Channel, GpuMemory, belong_to_server, serve_to_the_end
    from aotc.runtime.server.messages import Ready

    belong_to_server()
    channel = Channel(socket.socket(fileno=descriptor))
    channel.send(Ready({}))
    return serve_to_the_end(Engine(EchoExecutor(), ()), channel, GpuMemory(None))  # type: ignore[arg-type]


def make_client() -> Any:
    from aotc.runtime.server.engine_client import EngineClient

    return EngineClient("-", 64, [sys.executable, "-m", MODULE, "engine"])


def serve(tokenizer: str) -> None:
    """The server's process: prints its port."""
    from aotc.runtime.server.app import Server, Settings
    from aotc.runtime.server.http import HttpServer, listen
    from aotc.runtime.server.metrics import Metrics, ModelMetrics
    from aotc.runtime.server.served import ServedModel
    from aotc.runtime.tokenizer import Tokenizer

    metrics = Metrics("aotc")
    text = Tokenizer(Path(tokenizer), {})
    model = ServedModel("echo", MAX_LEN, VOCAB, make_client(), text, None, ModelMetrics(metrics, "echo"))
    http = HttpServer(Server(Settings(), [model], metrics), log_level="warning", access_log=False, shutdown_timeout=1)
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    http.run([listener])


def byte_tokenizer(path: Path) -> None:
    """One token a byte."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(path))


def request(**fields: Any) -> bytes:
    body = json.dumps({"model": "echo", "prompt": "hello", "temperature": 0, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def whole(data: bytes) -> bool:
    """Whether a response with a length is complete."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    at = head.lower().index(b"content-length:") + 15
    return len(body) >= int(head[at:].split(b"\r\n", 1)[0])


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    got = b""
    while not whole(got):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError("the server closed the connection")
        got += part
    if not got.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(got.decode())
    return got


def latencies(address: tuple[str, int], seconds: float) -> list[float]:
    """Seconds of each request, one after the other."""
    data, times = request(max_tokens=1), []
    with socket.create_connection(address) as connection:
        for _ in range(50):
            ask(connection, data)
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            ask(connection, data)
            times.append(time.perf_counter() - begin)
    return times


def token_seconds(address: tuple[str, int]) -> float:
    """Seconds from a stream's first piece to its end, a token."""
    with socket.create_connection(address) as connection:
        connection.sendall(request(max_tokens=STREAM, stream=True))
        got = connection.recv(1 << 16)
        begin, tail = time.perf_counter(), got
        while b"data: [DONE]" not in tail:
            part = connection.recv(1 << 16)
            if not part:
                raise ConnectionError("the server closed the connection")
            tail = tail[-20:] + part
        return (time.perf_counter() - begin) / STREAM


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, in itself and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests_a_second(address: tuple[str, int], seconds: float) -> tuple[float, int]:
    """Many connections, each with one request at a time: a second, and in all."""
    data, count = request(max_tokens=1), 0
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    buffers = dict.fromkeys(connections, b"")
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ)
        connection.sendall(data)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for key, _ in selector.select():
            connection: Any = key.fileobj
            buffers[connection] += connection.recv(1 << 16)
            if whole(buffers[connection]):
                assert buffers[connection].startswith(b"HTTP/1.1 200"), buffers[connection]
                buffers[connection], count = b"", count + 1
                connection.sendall(data)
    rate = count / (time.perf_counter() - begin)
    for connection in connections:
        connection.close()
    return rate, count


async def channel_seconds(count: int) -> list[float]:
    """Seconds of requests to the engine's process without HTTP."""
    from aotc.runtime.sampling import SamplingParams

    client, times = make_client(), []
    task = asyncio.create_task(client.run())
    await client.ready.wait()
    for _ in range(count):
        begin = time.perf_counter()
        async for _ in client.generate([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=1), 0):
            pass
        times.append(time.perf_counter() - begin)
    task.cancel()
    await asyncio.wait([task])
    return times[20:]


def percentile(times: list[float], share: float) -> float:
    """In milliseconds."""
    return 1e3 * float(np.quantile(times, share))


def measure(seconds: float) -> dict[str, float]:
    channel = asyncio.run(channel_seconds(500))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        byte_tokenizer(path)
        command = [sys.executable, "-m", MODULE, "serve", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in [os.getcwd(), *sys.path] if p)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                address = ("127.0.0.1", int(server.stdout.readline()))
                times = latencies(address, seconds)
                before = cpu_seconds(server.pid)
                tokens = min(token_seconds(address) for _ in range(5))
                token_cpu, before = (cpu_seconds(server.pid) - before) / (5 * STREAM), cpu_seconds(server.pid)
                rate, count = requests_a_second(address, seconds)
                cpu = (cpu_seconds(server.pid) - before) / count
            finally:
                server.terminate()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    inside50, inside99 = percentile(channel, 0.5), percentile(channel, 0.99)
    return {
        "p50_ms": p50, "p99_ms": p99, "channel_p50_ms": inside50, "channel_p99_ms": inside99,
        "added_p50_ms": p50 - inside50, "added_p99_ms": p99 - inside99, "token_us": 1e6 * tokens, "requests_s": rate,
        "cpu_us_request": 1e6 * cpu, "cpu_us_token": 1e6 * token_cpu,
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["engine"]:
        os._exit(engine(int(sys.argv[2])))
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each part")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    figures = measure(options.seconds)
    for name, value in figures.items():
        print(f"{name:<16} {value:10.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
