"""Runs kernels in CUDA C++ on a CPU: compiled with `lib/hopper_host.h` in place of `lib/hopper.cuh`. For tests."""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from aotc.codegen.cpu.build import compiler, run_tool
from aotc.codegen.cuda.frame import Source
from aotc.codegen.cuda.hopper import HEAD_END, header

_RUN = """
static void** arguments;
static const TensorMap* maps;
extern "C" void run_on_host(void** values, const TensorMap* tensor_maps, int x, int y, int z) {{
  arguments = values, maps = tensor_maps;
  host::threads = THREADS, host::grid = {{x, y, z}};
  host::body = [] {{ {symbol}({arguments}); }};
  std::vector<host::Index> all;
  for (int n = 0; n < x * y * z; ++n) all.push_back({{n % x, n / x % y, n / x / y}});
  const size_t at_once = {together} ? all.size() : {cluster};
  for (auto first = all.begin(); first < all.end(); first += at_once) host::run_blocks({{first, first + at_once}});
}}
"""


class _Map(ctypes.Structure):
    """`TensorMap` of the header."""

    _fields_ = [
        ("base", ctypes.c_void_p), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("box_rows", ctypes.c_int64),
        ("box_blocks", ctypes.c_int64), ("rest", ctypes.c_char * 88),
    ]  # fmt: skip


def load_cuda(origin: Source) -> Callable[..., None]:
    """The kernel of a source, called as `kernel(grid, addresses)`. Raises CompilerError."""
    symbol, text, maps = origin.symbol, origin.text, origin.maps
    body = text.partition(HEAD_END)[2]
    types = re.findall(r"(\w+)\* (?:p\d+|dims|counters|scratch)\b", body.partition("KERNEL")[2].partition("{\n")[0])
    places = [f"({kind}*)arguments[{n}]" for n, kind in enumerate(types)] + ["nullptr", "nullptr"]
    places += [f"maps[{n}]" for n in range(len(maps))]
    run = _RUN.format(symbol=symbol, arguments=", ".join(places), together=str(origin.together).lower(), cluster=origin.cluster)
    with tempfile.TemporaryDirectory(prefix="aotc-") as folder:
        source, library = Path(folder) / f"{symbol}.cpp", Path(folder) / f"{symbol}.so"
        source.write_text(header("hopper_host.h") + body + run)
        run_tool([compiler(), "-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-o", str(library), str(source)], symbol)
        function = ctypes.CDLL(str(library)).run_on_host

    def call(grid: tuple[int, int, int], addresses: list[int]) -> None:
        made = (_Map * len(maps))(
            *((addresses[m.argument], m.rows, m.columns, m.box_rows, m.box_blocks) for m in maps)
        )
        function((ctypes.c_void_p * len(addresses))(*addresses), made, *grid)

    return call
