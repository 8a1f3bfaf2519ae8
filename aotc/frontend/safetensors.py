"""Reads safetensors files over a memory map; format: the safetensors README.

A file is the length of a header (u64, little endian), the header (JSON: name -> dtype, shape, [begin, end) of the
bytes behind the header), and those bytes. Everything is checked against the file's size before it is used.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.checkpoint import TensorInfo, shown
from aotc.ir.dtypes import DTYPES

_DTYPES = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8",
    "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8", "BOOL": "bool",
}  # fmt: skip
_MOST_HEADER = 100_000_000  # the reference implementation's bound
_MOST_JSON = 1 << 28
_MOST_DIMS, _MOST_TENSORS = 8, 1 << 20
INDEX = "model.safetensors.index.json"


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object. A key that stands twice in an object is refused, as are NaN, infinities and deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"key {shown(twice)} stands twice")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise SourceError(f"{where} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise SourceError(f"{where} is damaged: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where} is damaged: it holds no JSON object")
    return value


def read_bytes(path: Path, most: int = _MOST_JSON) -> bytes:
    """A whole small file. Raises SourceError."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise SourceError(f"{path} has over {most} bytes")
    return data


@dataclass(frozen=True)
class _Tensor:
    data: mmap.mmap
    info: TensorInfo
    offset: int
    nbytes: int


class SafetensorsWeights:
    """The tensors of one or several files, under their own names."""

    def __init__(self, where: str, tensors: dict[str, _Tensor]) -> None:
        self._where, self._tensors = where, tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise SourceError(f"{self._where} has no tensor {shown(name)}")
        return self._tensors[name].info

    def read(self, name: str) -> np.ndarray:
        info, tensor = self.info(name), self._tensors[name]
        raw = np.frombuffer(tensor.data, np.uint8, tensor.nbytes, tensor.offset)
        return raw.view(DTYPES[info.dtype].np).reshape(info.shape)


def open_safetensors(folder: Path) -> SafetensorsWeights | None:
    """The weights in a folder: `model.safetensors`, or the files that its index names. None where there are none.

    A file that the index names must really lie beneath the folder, or beneath the real folder of the index: caches
    and mounts hold links to files elsewhere. Raises SourceError and UnsupportedError.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if index.is_file() and not single.is_file():
        return _open_index(folder, index)
    if not single.is_file():
        return None
    return SafetensorsWeights(str(single), _open_file(single, single.resolve()))


def _open_index(folder: Path, index: Path) -> SafetensorsWeights:
    places = parse_json(read_bytes(index), str(index)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise SourceError(f"{index} is damaged: it has no weight_map of tensors to files")
    roots = (folder.resolve(), index.resolve().parent)
    shards = {s: _open_file(folder / s, _beneath(folder, s, roots)) for s in dict.fromkeys(places.values())}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise SourceError(f"{index} places tensor {shown(name)} in {shown(shard)}, where it is not")
    for shard, tensors in shards.items():
        for name in tensors:
            if places.get(name) != shard:
                raise SourceError(f"{folder / shard} has tensor {shown(name)}, which {INDEX} does not place there")
    return SafetensorsWeights(str(index), {name: shards[shard][name] for name, shard in places.items()})


def _beneath(folder: Path, name: str, roots: Iterable[Path]) -> Path:
    """The real path of a file that another file names."""
    plain = all(part not in ("", ".", "..") for part in name.split("/")) and "\\" not in name
    if not plain or not name.endswith(".safetensors"):
        raise SourceError(f"{folder / INDEX} names {shown(name)}, which is no safetensors file of this folder")
    try:
        real = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise SourceError(f"{folder} has no {shown(name)}, which its index names: download it again") from None
    if not any(real.is_relative_to(root) for root in roots):
        raise SourceError(f"{folder / INDEX} names {shown(name)}, which leads out of this folder")
    return real


def _open_file(path: Path, real: Path) -> dict[str, _Tensor]:
    """The tensors of the file at `real`; messages call it `path`."""
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    try:
        # What was opened is what was checked: a folder on the way may have become a link in between.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or os.readlink(f"/proc/self/fd/{descriptor}") != str(real):
            raise SourceError(f"{path} is no regular file, or changed while it was opened")
        data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    finally:
        os.close(descriptor)
    return _parse(path, data)


def _parse(path: Path, data: mmap.mmap) -> dict[str, _Tensor]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MOST_HEADER, len(data) - 8):
        raise SourceError(f"{path} is damaged or no safetensors file: its header has {size} bytes, and it {len(data)}")
    header = parse_json(data[8 : 8 + size], str(path))
    header.pop("__metadata__", None)
    if len(header) > _MOST_TENSORS:
        raise SourceError(f"{path} has {len(header)} tensors")
    tensors, spans, space = {}, [], len(data) - 8 - size
    for name, entry in header.items():
        info, (begin, end) = _entry(path, name, entry)
        if end > space:
            raise SourceError(f"{path} is damaged: tensor {shown(name)} ends outside the file")
        tensors[name] = _Tensor(data, info, 8 + size + begin, end - begin)
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            kind = "overlaps another" if begin < at else "follows bytes that belong to none"
            raise SourceError(f"{path} is damaged: tensor {shown(name)} {kind}")
        at = end
    if at != space:
        raise SourceError(f"{path} is damaged: its last {space - at} bytes belong to no tensor")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    def fault(message: str) -> SourceError:
        return SourceError(f"{path} is damaged: tensor {shown(name)} {message}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault("has other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UnsupportedError(f"{path}: tensor {shown(name)} is {shown(dtype)}: aotc reads {', '.join(_DTYPES)}")
    for numbers, most in ((shape, _MOST_DIMS), (offsets, 2)):
        if not isinstance(numbers, list) or len(numbers) > most or not all(type(n) is int and n >= 0 for n in numbers):
            raise fault(f"has shape {shown(shape)} and offsets {shown(offsets)}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPES[_DTYPES[dtype]].itemsize:
        raise fault(f"has shape {shown(shape)} of {dtype} and offsets {shown(offsets)}")
    return TensorInfo(_DTYPES[dtype], tuple(shape)), (offsets[0], offsets[1])
