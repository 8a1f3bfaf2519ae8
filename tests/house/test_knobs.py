"""Environment variables: absent, empty, good, and refused with their own name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aotc import knobs
from aotc.errors import AotcError


@pytest.mark.parametrize("unset", [True, False])
def test_absent_and_empty_mean_the_default(monkeypatch: pytest.MonkeyPatch, unset: bool) -> None:
    names = ("CACHE", "DUMP", "NUM_THREADS", "CXX", "LOG", "API_KEY", "SYNC", "PTX", "TARGET")
    for name in (f"AOTC_{n}" for n in names):
        if unset:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", "/somewhere")
    assert knobs.cache_dir() == Path("/somewhere/.cache/aotc")
    assert (knobs.dump_dir(), knobs.num_threads(), knobs.cxx(), knobs.log_level()) == (None, None, None, None)
    assert knobs.api_key() is None and knobs.sync() is False and knobs.ptx() is False and knobs.target() is None


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("AOTC_CACHE", "~/models")
    monkeypatch.setenv("AOTC_DUMP", "dump")
    monkeypatch.setenv("AOTC_NUM_THREADS", "3")
    monkeypatch.setenv("AOTC_CXX", "clang++")
    monkeypatch.setenv("AOTC_LOG", "Debug")
    monkeypatch.setenv("AOTC_API_KEY", "secret")
    monkeypatch.setenv("AOTC_SYNC", "1")
    monkeypatch.setenv("AOTC_TARGET", "sm80")
    assert knobs.api_key() == "secret" and knobs.sync() is True and knobs.target() == "sm80"
    monkeypatch.setenv("AOTC_SYNC", "0")
    assert knobs.sync() is False
    assert (knobs.cache_dir(), knobs.dump_dir()) == (Path("/somewhere/models"), Path("dump"))
    assert (knobs.num_threads(), knobs.cxx(), knobs.log_level()) == (3, "clang++", "debug")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 2"])
def test_bad_thread_count_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AOTC_NUM_THREADS", value)
    with pytest.raises(AotcError, match="AOTC_NUM_THREADS"):
        knobs.num_threads()


def test_bad_log_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTC_LOG", "loud")
    with pytest.raises(AotcError, match="AOTC_LOG.*debug, info, warning, error"):
        knobs.log_level()


@pytest.mark.parametrize(("name", "read"), [("AOTC_SYNC", knobs.sync), ("AOTC_PTX", knobs.ptx)])
def test_bad_switch_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], bool]) -> None:
    monkeypatch.setenv(name, "yes")
    with pytest.raises(AotcError, match=f"{name} is 'yes'; set it to 0 or 1"):
        read()
