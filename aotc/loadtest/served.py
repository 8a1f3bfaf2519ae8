"""`aotc serve` in a process of its own, on a free port, for as long as it is measured."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from aotc.errors import ArtifactError

_SAYS = re.compile(r"^aotc: serving .* at (http://\S+)$", re.MULTILINE)
END_SECONDS = 40.0  # a server that was told to end gets so long
MOST_LINES = 20  # of what it complains about
COMMAND = (sys.executable, "-m", "aotc", "serve")


@contextlib.contextmanager
def served(artifact: str, arguments: Sequence[str], seconds: float) -> Iterator[str]:
    """The address of a server over the artifact, once it is ready; it has ended when the context is left. What it
    complained about meanwhile is repeated on standard error.

    Raises ArtifactError with what the server said where it ends, or is not ready within `seconds`.
    """
    command = [*COMMAND, artifact, "--port", "0", "--disable-access-log", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory(prefix="aotc-bench-") as folder, _terminated_as_interrupted():
        log = Path(folder) / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
        try:
            url = _wait_ready(process, log, seconds)
            yield url
            _end(process)
            _repeat(log.read_text(errors="replace"))
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        code, said = process.poll(), log.read_text(errors="replace")
        if code is not None:
            last = (said.strip().splitlines() or [f"exit code {code}"])[-1]
            raise ArtifactError(f"the server did not start: {last.removeprefix('aotc: error: ')}")
        found = _SAYS.search(said)
        if found and _ready(found[1]):
            return found[1]
        time.sleep(0.02)
    raise ArtifactError(f"the server was not ready within {seconds:g} s (--ready-timeout)")


def _ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is here, whatever the proxies say
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _repeat(said: str) -> None:
    lines = [line for line in said.splitlines() if not _SAYS.match(line)]
    for line in lines[:MOST_LINES]:
        print(f"server: {line}", file=sys.stderr)
    if len(lines) > MOST_LINES:
        print(f"server: and {len(lines) - MOST_LINES} lines more", file=sys.stderr)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # which does nothing where it has ended
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that the server ends with this process."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone takes signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
