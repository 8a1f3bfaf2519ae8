"""Element types. Names are StableHLO's with signed integers written `i`; the same names stand in plans and manifests."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its name, its numpy form, and its kind (`float`, `int`, `uint` or `bool`)."""

    name: str
    np: np.dtype
    kind: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.np.itemsize

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    def __repr__(self) -> str:
        return self.name


f64, f32, f16 = (DType(f"f{b}", np.dtype(f"float{b}"), "float") for b in (64, 32, 16))
bf16 = DType("bf16", np.dtype(ml_dtypes.bfloat16), "float")
i64, i32, i16, i8 = (DType(f"i{b}", np.dtype(f"int{b}"), "int") for b in (64, 32, 16, 8))
u64, u32, u16, u8 = (DType(f"u{b}", np.dtype(f"uint{b}"), "uint") for b in (64, 32, 16, 8))
bool_ = DType("bool", np.dtype(np.bool_), "bool")

DTYPES: dict[str, DType] = {d.name: d for d in (f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, bool_)}


def from_numpy(dtype: np.dtype) -> DType:
    """The DType of a numpy dtype. Raises KeyError for one that aotc has no name for."""
    return next((d for d in DTYPES.values() if d.np == dtype), None) or DTYPES[str(dtype)]


def accumulator(dtype: DType) -> DType:
    """The type that the reference computes in: f64 for f32 and f64, f32 for the 16-bit floats."""
    if not dtype.is_float:
        return dtype
    return f32 if dtype.itemsize == 2 else f64


def register_type(dtype: DType) -> DType:
    """The type that kernels compute in: f32 for floats of up to 32 bits, others as they are."""
    return f32 if dtype.is_float and dtype.itemsize < 8 else dtype
