"""Arrays of other libraries as addresses, without a copy, through DLPack.

The structures are those of https://dmlc.github.io/dlpack/latest/c_api.html, and the protocol that of
https://dmlc.github.io/dlpack/latest/python_spec.html. A capsule is kept, not consumed: its destructor gives the array
back to its library when the view is dropped.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.errors import RequestError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
DEVICE_NAMES = {CPU: "the CPU", CUDA: "a CUDA device", CUDA_HOST: "the CPU", CUDA_MANAGED: "CUDA's managed memory"}
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_CODES = {0: "i", 1: "u", 2: "f", 4: "bf", 6: "bool"}  # DLDataTypeCode

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


@dataclass(frozen=True)
class View:
    """A contiguous array where it lies. `owner` keeps its memory alive; `dtype` is a plan's name, as f32."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: int
    device_id: int
    read_only: bool
    owner: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def view_of(name: str, value: Any, stream: int | None = None) -> View:
    """The memory of a numpy array, or of anything with `__dlpack__`. `stream` is the CUDA stream that will use an array
    of a GPU: its library makes that wait for what it has begun. Raises RequestError in terms of `name`."""
    if isinstance(value, np.ndarray):
        return _numpy_view(name, value)
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        raise RequestError(f"{name} is a {type(value).__name__}: bind a numpy array or one that has __dlpack__")
    try:
        device = int(value.__dlpack_device__()[0])
        capsule = _capsule(value, {"stream": stream or 1} if device in (CUDA, CUDA_MANAGED) else {})
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise RequestError(f"{name} does not give its memory through DLPack: {said}") from None
    return _capsule_view(name, capsule)


def _numpy_view(name: str, array: np.ndarray) -> View:
    if not array.flags.c_contiguous:
        raise RequestError(f"{name} is not contiguous: bind np.ascontiguousarray(...) of it")
    dtype = "bool" if array.dtype == np.bool_ else f"{array.dtype.kind}{array.dtype.itemsize * 8}"
    if not array.dtype.isnative or array.dtype.kind not in "iufb":
        dtype = str(array.dtype)
    writable = array.flags.writeable
    return View(array.ctypes.data, array.shape, dtype, array.dtype.itemsize, CPU, 0, not writable, array)


def _capsule(value: Any, options: dict[str, int]) -> Any:
    try:
        return value.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # of a library older than versioned capsules
        return value.__dlpack__(**options)


def _capsule_view(name: str, capsule: Any) -> View:
    kind = _name_of(capsule)
    if kind == b"dltensor_versioned":
        versioned = _Versioned.from_address(_pointer_of(capsule, kind))
        if versioned.major != 1:
            spoken = f"{versioned.major}.{versioned.minor}"
            raise RequestError(f"{name} speaks DLPack {spoken}, this aotc 1: bind another kind of array")
        tensor, flags = versioned.tensor, versioned.flags
    elif kind == b"dltensor":
        tensor, flags = _Managed.from_address(_pointer_of(capsule, kind)).tensor, 0
    else:
        raise RequestError(f"{name} gives no DLPack capsule, but {kind!r}")
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _contiguous(shape, tensor.strides[: tensor.ndim]):
        raise RequestError(f"{name} is not contiguous: bind a contiguous copy")
    code = _CODES.get(tensor.code, f"code{tensor.code}_")
    dtype = code if code == "bool" else f"{code}{tensor.bits}"
    if tensor.lanes != 1:
        dtype += f"x{tensor.lanes}"
    address = (tensor.data or 0) + tensor.byte_offset
    return View(
        address, shape, dtype, tensor.bits * tensor.lanes // 8, tensor.device_type, tensor.device_id,
        bool(flags & _READ_ONLY), capsule,
    )  # fmt: skip


def _contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected and 0 not in shape:
            return False
        expected *= size
    return True
