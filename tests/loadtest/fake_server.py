"""A server of OpenAI's API for tests: a script of bytes for each request, over real sockets, in a thread."""

import asyncio
import contextlib
import json
import threading

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = {"object": "list", "data": [{"id": "fake/model", "max_model_len": 4096}]}


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(text="a", reason=None):
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def usage(prompt, completion):
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event(b"[DONE]")


def whole(status, value, reason="Said"):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"HTTP/1.1 %d %s\r\nContent-Length: %d\r\n\r\n%s" % (status, reason.encode(), len(data), data)


def answer(body):
    """The answer of a well-behaved server: as many tokens as asked for, each an event and a chunk."""
    count = body.get("max_tokens") or body["max_completion_tokens"]
    prompt = body.get("prompt") or body["messages"][0]["content"].split()
    events = [token(reason="length" if n == count - 1 else None) for n in range(count)]
    return [OK, *map(chunk, [*events, usage(len(prompt), count), DONE]), b"0\r\n\r\n"]


class FakeServer:
    """`script(body, number)` gives the parts of the answer to the `number`th question: bytes are sent, numbers are
    seconds to wait, and None closes the connection, "reset" with a reset. `asked` has (path, headers, body) of each
    request, `most` how many were unanswered at once, `connections` how many there were."""

    def __init__(self, script=lambda body, n: answer(body), tokenize=True, models=MODELS, metrics=None):
        self.script, self.tokenize, self.models, self.metrics = script, tokenize, models, metrics
        self.asked, self.connections, self.most, self.now, self.questions = [], 0, 0, 0, 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def bodies(self):
        """The questions, in the order in which they came."""
        return [body for path, _, body in self.asked if path.endswith("completions")]

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=1024, limit=1 << 22)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _talk(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        _, path, _ = first.split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(data) if data else None
        self.asked.append((path, headers, body))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for part in self._parts(path, body):
                if part is None:
                    return False
                if part == "reset":
                    writer.transport.abort()
                    return False
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
            return True
        finally:
            self.now -= 1

    def _parts(self, path, body):
        if path == "/v1/models":
            return [self.models if isinstance(self.models, bytes) else whole(200, self.models)]
        if path == "/tokenize" and self.tokenize:
            return [whole(200, {"tokens": [7, 11, 13, 7]})]
        if path == "/metrics" and self.metrics is not None:
            return [whole(200, self.metrics.encode())]
        if path.endswith("completions"):
            self.questions += 1
            return self.script(body, self.questions - 1)
        return [whole(404, {"error": {"message": "there is no such path"}})]
