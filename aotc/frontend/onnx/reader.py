"""Opens ONNX files: the model message, and the files beside it that hold weights.

External data is read from beneath the model's own folder alone: a location is relative, holds no `..`, and its real
path lies beneath the folder that the model was named in, or beneath the real folder of the model file (hub caches
are trees of symbolic links). The path is checked again on the open descriptor.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto

from aotc.errors import SourceError, UnsupportedError
from aotc.frontend.onnx.tensors import array_from, inline_array, plain, type_of

MIN_OPSET, MAX_OPSET = 7, 28
_MOST_BYTES = 2**31 - 1  # protobuf's own limit on a message


class ModelFile:
    """A parsed model and the folder that its external data may lie in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proto = _parse(path)
        self.opsets = _opsets(self.proto, path)
        self._external = ExternalFiles(path)

    def array(self, tensor: TensorProto, where: str) -> np.ndarray:
        """The content of a tensor of this model; external data is memory mapped."""
        if tensor.HasField("segment"):
            raise UnsupportedError(f"{where} is split into segments: save the model again with a current onnx")
        if tensor.data_location == TensorProto.EXTERNAL:
            return self._external.array(tensor, where)
        return inline_array(tensor, where)


def _parse(path: Path) -> ModelProto:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise SourceError(
                f"{path} has {size} bytes, an ONNX file has at most 2 GiB: store weights as external data"
            )
        proto = onnx.load_model_from_string(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (DecodeError, ValueError, RecursionError):
        raise SourceError(f"{path} is no ONNX file, or is cut off") from None
    if not proto.HasField("graph") or not proto.graph.output:
        raise SourceError(f"{path} is no ONNX file, or is cut off: it holds no graph with outputs")
    if not _is_text(proto):
        raise SourceError(f"{path} is damaged: it holds a name that is not UTF-8")
    return proto


def _is_text(message: Message) -> bool:
    """True where all names are texts: protobuf hands out bytes for a string that is not UTF-8."""
    for field, value in message.ListFields():
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE):
            for item in (value,) if isinstance(value, str | bytes | Message) else value:
                if isinstance(item, bytes) or (isinstance(item, Message) and not _is_text(item)):
                    return False
    return True


def _opsets(proto: ModelProto, path: Path) -> dict[str, int]:
    """Version by domain; the default domain's is required, and checked."""
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in proto.opset_import}
    version = opsets.get("")
    if version is None:
        if any(n.domain in ("", "ai.onnx") for n in proto.graph.node):
            raise SourceError(f"{path} imports no opset, or is cut off")
    elif not MIN_OPSET <= version <= MAX_OPSET:
        raise UnsupportedError(
            f"{path} uses ONNX opset {version}, aotc reads {MIN_OPSET} to {MAX_OPSET}: convert it with "
            f"onnx.version_converter"
        )
    return opsets


class ExternalFiles:
    """The files beside a model that hold data of its tensors, each mapped once."""

    def __init__(self, model: Path) -> None:
        self.folder = model.parent
        self.real_folders = (Path(os.path.realpath(model.parent)), Path(os.path.realpath(model)).parent)
        self.hard_linked = model.stat().st_nlink > 1
        self._maps: dict[str, memoryview] = {}

    def array(self, tensor: TensorProto, where: str) -> np.ndarray:
        """The tensor's bytes in its file. Raises SourceError for a bad place, offset or length."""
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        type_ = type_of(tensor, where)
        data = self._map(location, where)
        offset = _number(entries.get("offset", "0"), where)
        length = _number(entries["length"], where) if "length" in entries else len(data) - offset
        if length < 0 or offset > len(data) or length > len(data) - offset:
            raise SourceError(
                f"{where} lies at bytes {offset}..{offset + length} of {location}, which has {len(data)} bytes"
            )
        return array_from(data[offset : offset + length], type_, where)

    def _map(self, location: str, where: str) -> memoryview:
        if location not in self._maps:
            self._maps[location] = self._open(location, where)
        return self._maps[location]

    def _open(self, location: str, where: str) -> memoryview:
        parts = PurePosixPath(location)
        if not location or "\0" in location or "\\" in location or parts.is_absolute() or ".." in parts.parts:
            raise SourceError(f"{where} names the data file '{plain(location)}': only a path beneath the model is read")
        real = os.path.realpath(self.folder / location)
        self._require_inside(real, location, where)
        try:
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"{where} needs the data file {location}: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            # What was opened counts, not what the name meant a moment ago.
            self._require_inside(os.readlink(f"/proc/self/fd/{descriptor}"), location, where)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(f"{where} names the data file {location}, which is no regular file")
            # A hard link can bring any file of the disk into the folder; package installers link whole trees.
            if status.st_nlink > 1 and not self.hard_linked:
                raise SourceError(f"{where} names the data file {location}, which is a hard link: copy it instead")
            return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if status.st_size else b"")
        finally:
            os.close(descriptor)

    def _require_inside(self, real: str, location: str, where: str) -> None:
        if not any(Path(real).is_relative_to(folder) for folder in self.real_folders):
            raise SourceError(f"{where} names the data file {location}, which leads out of the model's folder")


def _number(text: str, where: str) -> int:
    if not text.isdigit() or len(text) > 19:
        raise SourceError(f"{where} has {text[:40]!r} for an offset or length of external data")
    return int(text)
