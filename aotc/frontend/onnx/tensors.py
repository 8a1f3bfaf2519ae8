"""TensorProtos: element types, shapes, and the arrays of those whose data lies in the model file."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from aotc.errors import SourceError, UnsupportedError
from aotc.ir.dtypes import DTYPES, DType
from aotc.ir.graph import TensorType

ELEMENT_TYPES: dict[int, DType] = {
    TensorProto.FLOAT: DTYPES["f32"], TensorProto.DOUBLE: DTYPES["f64"], TensorProto.FLOAT16: DTYPES["f16"],
    TensorProto.BFLOAT16: DTYPES["bf16"], TensorProto.INT64: DTYPES["i64"], TensorProto.INT32: DTYPES["i32"],
    TensorProto.INT16: DTYPES["i16"], TensorProto.INT8: DTYPES["i8"], TensorProto.UINT64: DTYPES["u64"],
    TensorProto.UINT32: DTYPES["u32"], TensorProto.UINT16: DTYPES["u16"], TensorProto.UINT8: DTYPES["u8"],
    TensorProto.BOOL: DTYPES["bool"],
}  # fmt: skip
_MOST_DIMS = 32
_LONGEST_NAME = 200


def plain(name: str) -> str:
    """A name of the file as a message may hold it: in one line, and not endless."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 60]}...{text[-57:]}"


def dtype_of(code: int, where: str) -> DType:
    """The DType of a TensorProto.DataType. Raises UnsupportedError that starts with `where`."""
    if code not in ELEMENT_TYPES:
        known = code in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(code).lower() if known else f"number {code}"
        raise UnsupportedError(f"{where} has the element type {name}, which aotc has none for: cast it to another")
    return ELEMENT_TYPES[code]


def type_of(tensor: TensorProto, where: str) -> TensorType:
    """Element type and shape that a tensor declares."""
    if len(tensor.dims) > _MOST_DIMS or min(tensor.dims, default=0) < 0:
        raise SourceError(f"{where} has the shape {list(tensor.dims)[:_MOST_DIMS]}, which no tensor has")
    return TensorType(dtype_of(tensor.data_type, where), tuple(tensor.dims))


def array_from(data: bytes | memoryview | np.ndarray, type_: TensorType, where: str) -> np.ndarray:
    """Little-endian bytes as an array of `type_`. Raises SourceError where their number does not fit."""
    raw = np.frombuffer(data, np.uint8)
    count = math.prod(type_.shape)  # type: ignore[arg-type]
    if raw.size != count * type_.dtype.itemsize:
        raise SourceError(
            f"{where} holds {raw.size} bytes, its shape {list(type_.shape)} needs {type_.dtype} x {count}"
        )
    array = raw.view(type_.dtype.np) if type_.dtype.name != "bool" else raw != 0
    return array.reshape(type_.shape)  # type: ignore[arg-type]


def inline_array(tensor: TensorProto, where: str) -> np.ndarray:
    """The array of a tensor whose data lies in the message: raw bytes, or one of the typed fields."""
    type_ = type_of(tensor, where)
    if tensor.HasField("raw_data"):
        return array_from(tensor.raw_data, type_, where)
    name = type_.dtype.name
    field = {
        "f32": tensor.float_data, "f64": tensor.double_data, "i64": tensor.int64_data, "u64": tensor.uint64_data,
        "u32": tensor.uint64_data,
    }.get(name, tensor.int32_data)  # fmt: skip
    count = math.prod(type_.shape)  # type: ignore[arg-type]
    if len(field) != count:
        raise SourceError(f"{where} holds {len(field)} elements, its shape {list(type_.shape)} needs {count}")
    if name in ("f16", "bf16"):  # the field holds their bits
        return np.array(field, np.int64).astype(np.uint16).view(type_.dtype.np).reshape(tuple(tensor.dims))
    wide = np.float64 if type_.dtype.is_float else np.uint64 if name in ("u64", "u32") else np.int64
    return np.array(field, wide).astype(type_.dtype.np).reshape(tuple(tensor.dims))
