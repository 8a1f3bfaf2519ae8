"""The process in which `aotc.codegen.cuda.fake_device` runs kernels under Triton's interpreter."""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

from aotc.codegen.cuda.fake_device import GUARD_BYTES, Request
from aotc.codegen.cuda.frame import Source
from aotc.codegen.cuda.host_cuda import load_cuda

_GUARD = 0x5A
_TORCH = {
    "*fp64": torch.float64, "*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16,
    "*i64": torch.int64, "*i32": torch.int32, "*i16": torch.int16, "*i8": torch.int8, "*u64": torch.uint64,
    "*u32": torch.uint32, "*u16": torch.uint16, "*u8": torch.uint8,
}  # fmt: skip
_LIBDEVICE = {
    "expm1": np.expm1, "log1p": np.log1p, "cbrt": np.cbrt, "tan": np.tan, "tanh": np.tanh, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "rint": np.rint, "trunc": np.trunc, "pow": np.power, "atan2": np.arctan2, "fmod": np.fmod,
}  # fmt: skip

# Triton's compiler multiplies no less than this (m, n, k), and its interpreter anything.
interpreter.interpreter_builder.codegen_fns["min_dot_size"] = lambda left, right: (1, 1, 16)

# Kernels run one after the other here: there is nothing to wait for.
cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None


class Memory:
    """Blocks at 64-byte aligned addresses, guard bytes on both sides of each."""

    def __init__(self, blocks: dict[str, np.ndarray]) -> None:
        self._whole: dict[str, np.ndarray] = {}
        self.blocks: dict[str, np.ndarray] = {}
        for name, content in blocks.items():
            padded = np.full(len(content) + 2 * GUARD_BYTES + 64, _GUARD, np.uint8)
            padded = padded[-padded.ctypes.data % 64 :][: len(content) + 2 * GUARD_BYTES]
            self.blocks[name] = padded[GUARD_BYTES : GUARD_BYTES + len(content)]
            self.blocks[name][:] = content
            self._whole[name] = padded

    def tensor(self, kind: str, block: str, offset: int) -> torch.Tensor:
        """The memory from an address on, as a kernel's argument."""
        dtype = _TORCH[kind]
        data = self._whole[block][GUARD_BYTES + offset :]
        return torch.from_numpy(data[: len(data) // dtype.itemsize * dtype.itemsize]).view(dtype)

    def damaged(self) -> str | None:
        """A block whose guards were written."""
        for name, padded in self._whole.items():
            if (padded[:GUARD_BYTES] != _GUARD).any() or (padded[-GUARD_BYTES:] != _GUARD).any():
                return name
        return None


def run(request: Request) -> dict[str, np.ndarray]:
    """All blocks after the steps."""
    memory = Memory(request.blocks)
    for block, offset, target in request.relocations:
        memory.blocks[block][offset : offset + 8].view(np.uint64)[0] = memory.blocks[target].ctypes.data
    kernels = {symbol: load(source) for symbol, source in request.sources.items()}
    _execute(request.steps, kernels, memory)
    return memory.blocks


def _execute(steps: list[Any], kernels: dict[str, Any], memory: Memory) -> None:
    for step in steps:
        if step[0] == "if":
            _, (block, offset), then, orelse = step
            _execute(then if memory.blocks[block][offset] else orelse, kernels, memory)
            continue
        _, symbol, grid, places = step
        try:
            kernels[symbol](grid, [memory.tensor(kind, *place) for kind, place in places])
        except Exception as error:
            raise RuntimeError(f"kernel {symbol} failed: {error!r}") from error
        damaged = memory.damaged()
        if damaged:
            raise RuntimeError(f"kernel {symbol} wrote outside of {damaged}")


def load(source: Source) -> Callable[[tuple[int, int, int], list[torch.Tensor]], None]:
    """The kernel of a source. Triton reads it again through linecache."""
    if source.language == "cuda":
        kernel = load_cuda(source)
        return lambda grid, tensors: kernel(grid, [t.data_ptr() for t in tensors])
    file = f"<{source.symbol}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(True), file)
    module: dict[str, Any] = {"__name__": "aotc_kernels"}
    exec(compile(source.text, file, "exec"), module)
    return lambda grid, tensors: module[source.symbol][grid](*tensors)


def _elementwise(function: Any) -> Any:
    def call(*args: Any) -> Any:
        handle = args[0].handle
        data = function(*(a.handle.data for a in args)).astype(handle.data.dtype)
        type_ = tl.block_type(args[0].dtype, list(data.shape)) if args[0].type.is_block() else args[0].type
        return tl.tensor(interpreter.TensorHandle(data, handle.dtype), type_)

    return call


def complete_interpreter() -> None:
    """Adds what Triton 3.6's interpreter lacks: libdevice, products of bf16 tiles (it holds them as uint16), and
    scalars as bounds of loops under NumPy 2.4 (it holds them as arrays of one element)."""
    for name, function in _LIBDEVICE.items():
        setattr(libdevice, name, _elementwise(function))
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, *(_wide(x) for x in (a, b)), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot  # type: ignore[method-assign]
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def main() -> None:
    """Answers requests of stdin until it ends: blocks, or the line of an error."""
    complete_interpreter()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = run(request)
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
