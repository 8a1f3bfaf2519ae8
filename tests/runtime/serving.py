"""A server for tests: in a thread, over a fake engine process, spoken to through real sockets."""

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from pathlib import Path

import httpx

from aotc.runtime.chat_template import ChatTemplate
from aotc.runtime.server.app import Server, Settings
from aotc.runtime.server.engine_client import EngineClient
from aotc.runtime.server.http import HttpServer, listen
from aotc.runtime.server.metrics import Metrics, ModelMetrics
from aotc.runtime.server.served import ServedModel
from aotc.runtime.tokenizer import Tokenizer

FAKE = Path(__file__).with_name("fake_engine.py")
VOCAB, MAX_LEN = 258, 200
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Running:
    """A server in a thread, the engine of each model in a process. The first model's parts are at hand."""

    def __init__(
        self, folder, tokenizer, api_key=None, queue=64, seqs=4, template=TEMPLATE, shutdown=5, config=None,
        names=("fake",), breaker=None, port=0, load_timeout=60.0, access_log=False, request_timeout=None,
    ):  # fmt: skip
        self.folder = folder
        self.metrics = Metrics("aotc")
        models = []
        for name in names:
            home = folder if name == names[0] else folder / name
            home.mkdir(parents=True, exist_ok=True)
            engine = EngineClient(str(home), seqs, [sys.executable, str(FAKE)], load_timeout=load_timeout)
            chat, counts = ChatTemplate(template) if template else None, ModelMetrics(self.metrics, name)
            models.append(ServedModel(name, MAX_LEN, VOCAB, engine, tokenizer, chat, counts, config or {}))
            models[-1].request_timeout = request_timeout
            if breaker is not None:
                models[-1].breaker = breaker
        self.model, self.engine = models[0], models[0].engine
        self.server = Server(Settings(api_key, queue), models, self.metrics)
        level = logging.getLevelName(logging.getLogger("uvicorn").level).lower()
        level = "critical" if level == "notset" else level  # those of a test's log
        self.http = HttpServer(self.server, log_level=level, access_log=access_log, shutdown_timeout=shutdown)
        self.socket = listen("127.0.0.1", port)
        self.address = self.socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.thread = threading.Thread(target=lambda: asyncio.run(self.http.serve([self.socket])))
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.client.close()
        self.http.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert not any(map(alive, self.pids()))

    def wait_ready(self):
        wait(lambda: self.client.get("/health").status_code == 200)
        return self

    def http_loop(self):
        """The server's event loop."""
        return self.http.servers[0].get_loop()

    def log(self, event=None):
        return log_of(self.folder, event)

    def pids(self):
        return [line["pid"] for line in self.log("start")]

    def submitted(self, prompt):
        """How often the engines were asked for a prompt."""
        return sum(line["prompt"] == prompt for line in self.log("submit"))

    def complete(self, prompt, **fields):
        return self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})

    def chat(self, content, **fields):
        messages = [{"role": "user", "content": content}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    def metric(self, name, **labels):
        """The value of a metric; 0 where a labelled one was never counted."""
        for line in self.client.get("/metrics").text.splitlines():
            wanted = [f'{k}="{v}"' for k, v in labels.items()]
            if line.startswith(name + "{") and all(w in line for w in wanted):
                return float(line.rsplit(" ", 1)[1])
        assert labels, name
        return 0.0

    def connect(self, *parts):
        """A raw connection, with the parts of a request sent one by one."""
        connection = socket.create_connection(self.address, timeout=10)
        for part in parts:
            connection.sendall(part)
        return connection


def log_of(folder, event=None):
    """What the engines wrote down; a line that is not yet whole is left out."""
    path = folder / "log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in read if event in (None, line["event"])]


def post(path, body, headers=()):
    """The bytes of a POST of JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(data), **dict(headers)}
    head = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def alive(pid):
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait(condition, seconds=10.0):
    """Polls until the condition holds and returns what it gave."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return value


def events(response):
    """The JSON of each server-sent event; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def later(function, *arguments, **fields):
    """Calls in a thread; the result of the returned function is that of the call."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments, **fields)))
    thread.start()

    def result(seconds=20):
        thread.join(seconds)
        return results[0]

    return result


def read(connection, enough=None):
    """What a raw connection receives until `enough` is in it, or until the other end closes."""
    data = b""
    while enough is None or enough not in data:
        part = connection.recv(1 << 16)
        if not part:
            return data
        data += part
    return data


if __name__ == "__main__":  # serving.py FOLDER TOKENIZER [PORT]: a server in a process of its own, for signals
    running = Running(Path(sys.argv[1]), Tokenizer(sys.argv[2], {"eos_token_id": 257}), port=int((*sys.argv[3:], 0)[0]))
    print(running.address[1], flush=True)
    running.http.run([running.socket])
