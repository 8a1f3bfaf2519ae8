"""A fake server, and the command over it."""

import contextlib
from types import SimpleNamespace

import pytest
from fake_server import FakeServer

from aotc.cli import main


@pytest.fixture
def serve():
    """serve(script, **options) -> a FakeServer, ended with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(FakeServer(*arguments, **options))


@pytest.fixture
def bench(capfd, monkeypatch):
    """bench(target, *arguments) -> code, out and err of `aotc bench serve`, with small lengths before the arguments."""
    monkeypatch.delenv("AOTC_API_KEY", raising=False)
    small = ["--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "3", "--timeout", "20"]

    def call(target, *arguments):
        capfd.readouterr()
        try:
            code = main(["bench", "serve", str(target), *small, *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        return SimpleNamespace(code=code, **capfd.readouterr()._asdict())

    return call
