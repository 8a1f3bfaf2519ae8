"""A server under load for a long time: `python -m benchmarks.soak_server [--minutes M] [--seed S]`.

`aotc serve`'s parts over a model that takes no time (`benchmarks.http_cost`), each in its own process. Clients ask whole
answers and streams, leave in the middle, send nonsense, read slowly, and now and then the engine is killed. Every answer
must be right, and memory and descriptors of the server and of the engine must stay flat: what they have after a quarter
of the time is held against the end. Exit code 1 and a line that says what was wrong, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.http_cost import MODULE, ask, byte_tokenizer, request

GROWTH = 8 << 20  # bytes of memory that may come on top after the first quarter
DESCRIPTORS = 24  # and descriptors: connections come and go
CLIENTS = 8
KILL_EVERY = 20.0  # seconds


def right(data: bytes, tokens: int) -> bool:
    """Whether an answer is the prompt's first token over and over."""
    return json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "h" * tokens


def whole(address: tuple[str, int], rng: random.Random) -> str:
    tokens = rng.randint(1, 40)
    with socket.create_connection(address, timeout=30) as connection:
        try:
            return "answered" if right(ask(connection, request(max_tokens=tokens)), tokens) else "wrong"
        except RuntimeError as error:
            return "engine" if " 503 " in str(error) else f"wrong: {error}"


def stream(address: tuple[str, int], rng: random.Random) -> str:
    tokens = rng.randint(1, 300)
    data = b""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(request(max_tokens=tokens, stream=True))
        while b"data: [DONE]" not in data[-200:]:
            part = connection.recv(1 << 16)
            if not part:
                return f"wrong: a stream broke off after {data[-200:]!r}"
            data += part
            if rng.random() < 0.01:
                time.sleep(0.05)  # a slow reader
    if b'"error"' in data or b" 503 " in data[:20]:
        return "engine"
    return "answered" if data.count(b'"text":"h"') == tokens else "wrong: a token of a stream is missing"


def leave(address: tuple[str, int], rng: random.Random) -> str:
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(request(max_tokens=3000, stream=rng.random() < 0.5, n=4, temperature=1))
        if rng.random() < 0.5:
            connection.recv(1000)
    return "left"


def nonsense(address: tuple[str, int], rng: random.Random) -> str:
    body = rng.choice([b"{", b"\xff" * 9, b'{"prompt": 3}', b'{"prompt": "a", "n": -1}', b"[" * 50_000])
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return "refused" if connection.recv(12) == b"HTTP/1.1 400" else "wrong: nonsense was taken"


def client(address: tuple[str, int], seed: int, counts: Counter[str], end: float) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        act = rng.choices((whole, stream, leave, nonsense), (6, 4, 1, 1))[0]
        try:
            counts[act(address, rng)] += 1
        except OSError as error:
            counts[f"wrong: {act.__name__}: {error}"] += 1


def resources(pid: int) -> tuple[int, int]:
    """(bytes of memory that are a process's own, open descriptors)."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))
    return resident, len(os.listdir(f"/proc/{pid}/fd"))


def engine_of(pid: int) -> int | None:
    """The engine's process of a server, when it has one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def watch(server: int, end: float, begin: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Kills the engine now and then; what the server had after a quarter of the time and has at the end."""
    early, quarter = resources(server), begin + (end - begin) / 4
    next_kill, measured = begin + KILL_EVERY, False
    while (now := time.monotonic()) < end:
        time.sleep(min(1.0, end - now))
        if not measured and now > quarter:
            early, measured = resources(server), True
        if now > next_kill and (engine := engine_of(server)) is not None:
            next_kill = now + KILL_EVERY
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
    return early, resources(server)


def soak(minutes: float, seed: int) -> list[str]:
    """Runs it; returns what was wrong."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        byte_tokenizer(path)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in [os.getcwd(), *sys.path] if p)}
        command = [sys.executable, "-m", MODULE, "serve", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                address = ("127.0.0.1", int(server.stdout.readline()))
                begin = time.monotonic()
                end = begin + 60 * minutes
                arguments = [(address, seed + n, counts, end) for n in range(CLIENTS)]
                threads = [threading.Thread(target=client, args=a) for a in arguments]
                for thread in threads:
                    thread.start()
                early, late = watch(server.pid, end, begin)
                for thread in threads:
                    thread.join(60)
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(60)
    print(json.dumps({"minutes": minutes, "counts": counts, "early": early, "late": late}))
    wrong = [f"{what} ({count} times)" for what, count in counts.items() if what.startswith("wrong")]
    if late[0] > early[0] + GROWTH:
        wrong.append(f"the server's memory grew from {early[0] >> 20} to {late[0] >> 20} MiB")
    if late[1] > early[1] + DESCRIPTORS:
        wrong.append(f"the server's descriptors grew from {early[1]} to {late[1]}")
    if counts["answered"] < 10:
        wrong.append("hardly anything was answered")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = soak(options.minutes, options.seed)
    for line in wrong:
        print(f"soak: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
