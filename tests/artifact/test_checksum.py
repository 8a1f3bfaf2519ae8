"""Checksums of weights are zlib's, whoever computes them."""

import importlib
import random
import sys
import zlib

import pytest

from aotc.artifact import checksum


@pytest.fixture(params=["as installed", "without isal"])
def crc32(request, monkeypatch):
    if request.param == "without isal":
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    yield importlib.reload(checksum).crc32
    monkeypatch.undo()
    importlib.reload(checksum)


def test_it_is_the_number_that_zlib_gives(crc32):
    data = random.Random(1).randbytes(100_003)
    for size in (0, 1, 63, 5000, len(data)):
        assert crc32(memoryview(data)[:size]) == zlib.crc32(data[:size])
    assert crc32(data[77:], crc32(data[:77])) == zlib.crc32(data)
