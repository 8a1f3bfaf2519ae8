"""Builds IR nodes from ATen calls: torch's conveniences over the plain Builder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotc.errors import UnsupportedError
from aotc.ir.builder import Builder
from aotc.ir.dtypes import DTYPES, DType
from aotc.ir.graph import Value
from aotc.ir.ops.elementwise import ConvertAttrs
from aotc.ir.ops.shape import BroadcastAttrs, ConstantAttrs, ShapeAttrs
from aotc.ir.sizes import Size

Row = Callable[..., Any]
"""Gets the importer, then the operator's arguments, with tensors as values and symbolic ints as sizes."""

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def dtype_of(dtype: torch.dtype) -> DType:
    """The DType of a torch dtype. Raises UnsupportedError."""
    if dtype not in _DTYPES:
        raise UnsupportedError(f"the model uses {dtype}, which aotc has no element type for")
    return DTYPES[_DTYPES[dtype]]


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a DType."""
    return next(t for t, name in _DTYPES.items() if name == dtype.name)


class Importer(Builder):
    """A builder that also does torch's conveniences: scalars, broadcasting, type promotion, negative axes."""

    result: Any = None
    """torch's own result of the call."""
    clamps_indices = False
    """True where indices come from callers that nothing has checked."""
    size_of: Callable[[Any], Size] = staticmethod(lambda s: s)

    @property
    def dtype(self) -> DType:
        """Element type of torch's own result."""
        return dtype_of(self.result.dtype)

    def convert(self, x: Value, dtype: DType) -> Value:
        return x if x.type.dtype == dtype else self.emit("convert", x, attrs=ConvertAttrs(dtype))

    def broadcast(self, x: Value, shape: tuple[Size, ...]) -> Value:
        """Numpy's broadcasting: trailing axes align."""
        if x.type.shape == shape:
            return x
        axes = tuple(range(len(shape) - x.type.rank, len(shape)))
        return self.emit("broadcast_in_dim", x, attrs=BroadcastAttrs(shape, axes))

    def scalar(self, value: Any, dtype: DType, shape: tuple[Size, ...]) -> Value:
        if dtype.is_float:
            value = float(value)
        return self.emit("constant", attrs=ConstantAttrs(value, dtype, shape))

    def shape(self) -> tuple[Size, ...]:
        """Shape of torch's own result."""
        return tuple(self.size_of(s) for s in self.result.shape)

    def operands(self, args: tuple[Any, ...], dtype: DType) -> list[Value]:
        """Arguments, tensors or numbers, converted and broadcast to the result's shape."""
        shape = self.shape()
        return [
            self.broadcast(self.convert(a, dtype), shape) if isinstance(a, Value) else self.scalar(a, dtype, shape)
            for a in args
        ]

    def reshape(self, x: Value, shape: tuple[Size, ...]) -> Value:
        return x if x.type.shape == shape else self.emit("reshape", x, attrs=ShapeAttrs(shape))


def axis_of(x: Value, axis: int) -> int:
    """An axis from the front. A scalar has an axis by name only."""
    return axis % max(x.type.rank, 1)


def axes_of(x: Value, axes: Any) -> tuple[int, ...]:
    """Axes from the front; all where none is given."""
    if axes is None or axes == [] or not x.type.rank:
        return tuple(range(x.type.rank))
    return tuple(sorted(axis_of(x, a) for a in (axes if isinstance(axes, list | tuple) else [axes])))
