"""An engine process without a model: `fake_engine.py FD FOLDER MAX_NUM_SEQS`, for tests of the server.

It answers with its prompt, over and over, from an offset that seed and choice decide where the temperature is not 0.
Words in the prompt make it misbehave at output number N: `eos:N` ends, `nan:N` gives no valid token, `fault:N` is an
error of the device, `bug:N` an exception, `die:N` ends the process the first time and `kill:N` every time. `slow` takes
20 ms a step, `nap` a second and a half for the first token, `stuck` the first time never returns.

Files in FOLDER, looked at on start: `refuse` and `unplugged` hold the message with which it refuses for the artifact's
sake or for the device's, `crash` ends it without one, `load` makes it load for ever, once, `babble` holds bytes that it
sends when it is ready, once. What happens is written to FOLDER/log, a JSON line each.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aotc.errors import DeviceLostError
from aotc.runtime.engine import Engine
from aotc.runtime.sequence import Request, Row, Sequence
from aotc.runtime.server import engine_process
from aotc.runtime.server.engine_process import Channel, GpuMemory, belong_to_server, serve_to_the_end
from aotc.runtime.server.messages import Ready, Unusable

EOS, VOCAB, MAX_MODEL_LEN = 257, 258, 200
_COMMAND = re.compile(r"(eos|nan|die|kill|fault|bug):(\d+)")


@dataclass
class Result:
    token: np.ndarray
    logprobs: np.ndarray
    logprob_ids: np.ndarray


def text_of(ids) -> str:
    """ASCII without blanks: the tests' tokenizer numbers those characters from '!' on."""
    return "".join(chr(i + 33) if i < 94 else " " for i in ids)


class FakeExecutor:
    """A device whose model echoes."""

    max_num_batched_tokens, max_model_len, vocab_size = 64, MAX_MODEL_LEN, VOCAB
    num_pages = page_size = page_bytes = offload_memory = 0
    runs_ahead = False

    def __init__(self, folder: Path, max_num_seqs: int) -> None:
        self.folder, self.max_num_seqs = folder, max_num_seqs

    def start(self, sequence: Sequence) -> None:
        pass

    def wait(self, step: Result) -> Result:
        return step

    def launch(self, rows: list[Row]) -> Result:
        count = len(rows)
        ids, logprobs = np.full((count, 21), -1, np.int32), np.full((count, 21), -2.0, np.float32)
        result = Result(np.zeros(count, np.int32), logprobs, ids)
        for n, row in enumerate(rows):
            if row.samples:
                result.token[n] = self._token(row.sequence)
            ids[n, 0], logprobs[n, 0] = result.token[n], -0.5
            ids[n, 1:6] = range(1, 6)
        return result

    def _token(self, sequence: Sequence) -> int:
        request, number = sequence.request, len(sequence.outputs)
        text = text_of(request.prompt_token_ids)
        if "slow" in text:
            time.sleep(0.02)
        if "nap" in text and number == 0:
            time.sleep(1.5)
        if "stuck" in text and self._first_time():
            time.sleep(600)
        for word, at in _COMMAND.findall(text):
            if number == int(at):
                if word == "eos":
                    return EOS
                if word == "nan":
                    return -1
                if word == "fault":
                    raise DeviceLostError("step 3 failed in program decode_1")
                if word == "bug":
                    raise ZeroDivisionError
                if word == "kill" or self._first_time():
                    os._exit(1)
        shift = 0 if request.params.greedy else 7 * request.seed + request.choice
        return request.prompt_token_ids[(number + shift) % sequence.prompt_len]

    def _first_time(self) -> bool:
        flag = self.folder / "misbehaved"
        first = not flag.exists()
        flag.touch()
        return first


class LoggingEngine(Engine):
    """Writes down what the server asked for."""

    def __init__(self, executor: FakeExecutor) -> None:
        super().__init__(executor, (EOS,))
        self._log = executor.folder / "log"

    def log(self, event: str, **fields) -> None:
        with open(self._log, "a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def submit(self, request: Request) -> None:
        self.log(
            "submit", id=request.request_id, prompt=text_of(request.prompt_token_ids), choice=request.choice,
            priority=request.priority, salt=request.cache_salt,
        )  # fmt: skip
        super().submit(request)

    def cancel(self, request_id: str) -> bool:
        known = super().cancel(request_id)
        self.log("cancel", id=request_id, known=known, free=self.scheduler.free_slots)
        return known


class FakeGpu:
    """Three quarters of it are in use."""

    def call(self, name: str) -> tuple[int, int]:
        assert name == "cuMemGetInfo"
        return 10 << 30, 40 << 30


def main() -> None:
    descriptor, folder, seqs = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    belong_to_server()
    engine_process.HEARTBEAT = 0.05
    channel = Channel(socket.socket(fileno=descriptor))
    engine = LoggingEngine(FakeExecutor(folder, seqs))
    engine.log("start", pid=os.getpid())
    for name in ("refuse", "unplugged"):
        if (folder / name).exists():
            channel.send(Unusable((folder / name).read_text(), may_pass=name == "unplugged"))
            os._exit(2)
    if (folder / "crash").exists():
        os._exit(1)
    if (folder / "load").exists():
        (folder / "load").unlink()
        time.sleep(600)
    memory = GpuMemory(FakeGpu())
    channel.send(Ready({"weights": 1, **memory.news()}))
    if (folder / "babble").exists():
        garbage = (folder / "babble").read_bytes()
        (folder / "babble").unlink()  # before the server can end this process
        channel._socket.sendall(garbage)
    code = serve_to_the_end(engine, channel, memory)
    engine.log("end", code=code)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
