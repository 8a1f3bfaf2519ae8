"""What the driver is told of a kernel node: C structures in memory of this process, which it copies."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.runtime.devices import driver as api

_ELEMENTS = {"bf16": api.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "f16": api.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}
_WORD = ctypes.sizeof(ctypes.c_uint64)


class KernelNode:
    """Parameters of one node after the other, in the same memory: the driver is done with a node's when it has added it.

    A kernel takes up to `arguments` pointers, and up to `maps` tensor maps by value behind them. `params` is what
    cuGraphAddKernelNode takes.
    """

    def __init__(self, arguments: int, maps: int) -> None:
        self.params = api.KernelNodeParams()
        self._values = (ctypes.c_uint64 * arguments)()
        first = ctypes.addressof(self._values)
        self._own = [first + _WORD * n for n in range(arguments)]
        self._places = (ctypes.c_uint64 * (arguments + maps))(*self._own)
        self._block = (ctypes.c_uint8 * (maps * api.CU_TENSOR_MAP_BYTES + api.CU_TENSOR_MAP_ALIGNMENT))()
        self._maps = -(-ctypes.addressof(self._block) // api.CU_TENSOR_MAP_ALIGNMENT) * api.CU_TENSOR_MAP_ALIGNMENT
        self._moved = False  # places of arguments have been those of maps
        self.params.kernelParams = ctypes.addressof(self._places)

    def kernel(self, function: int, grid: Sequence[int], threads: int, shared: int) -> None:
        """Which kernel, its blocks in three dims, the threads of a block, bytes of dynamic shared memory."""
        params = self.params
        params.func = function
        params.gridDimX, params.gridDimY, params.gridDimZ = grid
        params.blockDimX, params.blockDimY, params.blockDimZ = threads, 1, 1
        params.sharedMemBytes = shared

    def arguments(self, values: list[int]) -> None:
        """64 bits each."""
        self._values[: len(values)] = values
        if self._moved:
            self._places[: len(self._own)] = self._own
            self._moved = False

    def tensor_map(self, behind: int, number: int) -> int:
        """Where map `number` of a kernel with `behind` other arguments goes: an address."""
        place = self._maps + number * api.CU_TENSOR_MAP_BYTES
        self._places[behind + number] = place
        self._moved = True
        return place


def tiled(meta: Mapping[str, Any], address: int) -> tuple[Any, ...]:
    """What `aotc.codegen.cuda.frame.TensorMap` says of an argument, as cuTensorMapEncodeTiled takes it: boxes of 64
    columns, which lie in swizzled rows of 128 bytes, and outside of the matrix zeros."""
    rows, columns = meta["rows"], meta["columns"]
    sizes = (ctypes.c_uint64 * 3)(64, rows, columns // 64)
    strides = (ctypes.c_uint64 * 2)(2 * columns, 128)  # bytes, of all dims but the first
    box = (ctypes.c_uint * 3)(64, meta["box_rows"], meta["box_blocks"])
    return (
        _ELEMENTS[meta["dtype"]], 3, address, sizes, strides, box, (ctypes.c_uint * 3)(1, 1, 1),
        api.CU_TENSOR_MAP_INTERLEAVE_NONE, api.CU_TENSOR_MAP_SWIZZLE_128B, api.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        api.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
