"""The manifest of an artifact: everything in it, with sizes and checksums. JSON, hashed itself."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from aotc.errors import ArtifactError

FORMAT_VERSION = 4  # tensor models of earlier formats are read as well: theirs did not change
KV_LAYOUTS = ("static", "paged")
CHUNK_BYTES = 4 << 20  # of weights.bin that one checksum covers
PAGE = 4096  # where weights of 1 MiB and more begin, and what a target's share of weights.bin is made of
ITEM_BYTES = {
    "f64": 8, "i64": 8, "u64": 8, "f32": 4, "i32": 4, "u32": 4, "f16": 2, "bf16": 2, "i16": 2, "u16": 2, "i8": 1,
    "u8": 1, "bool": 1,
}  # fmt: skip
"""Element types that manifests and plans may name, with their sizes."""


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class File(_Struct, frozen=True):
    """A file besides the weights."""

    size: int
    sha256: str


class Weight(_Struct, frozen=True):
    """A tensor of weights.bin. Several names may share a place. `shape` is logical; `packing` names the layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    packing: str | None = None


class StateField(_Struct, frozen=True):
    """A part of a slot of the state or of a block of the cache: `shape` is that of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class State(_Struct, frozen=True):
    """What lives from step to step besides the KV cache: `slot_bytes` for each sequence, sized at load."""

    slot_bytes: int
    fields: tuple[StateField, ...]


class KVCache(_Struct, frozen=True):
    """A layout of the KV cache: blocks of `block_bytes` that hold all layers' keys and values of `block_tokens` tokens,
    as many as are asked for at load. A block is a sequence where `layout` is static, and a page where it is paged."""

    layout: str
    block_bytes: int
    block_tokens: int
    fields: tuple[StateField, ...]


class ProgramEntry(_Struct, frozen=True):
    """A program of a target. `kind` is decode (bucket: rows), extend (bucket: tokens) or call (bucket: rows, or 0 where
    it is the only one); `kv_layout` is how its KV cache lies, for those that have one."""

    name: str
    kind: str
    bucket: int
    plan: str
    kv_layout: str = ""


class TargetEntry(_Struct, frozen=True):
    """Everything for one architecture. `scratch_bytes` is a thread's (CPU), `dims` orders the
    values of dims in device memory, `counter_bytes` are of zeroed memory (CUDA). `weights` are the pages of weights.bin
    that its plans name, as (offset, bytes), ascending; none listed: the whole."""

    name: str
    device: str
    library: str
    arena_bytes: int
    scratch_bytes: int
    programs: tuple[ProgramEntry, ...]
    dims: tuple[str, ...] = ()
    counter_bytes: int = 0
    weights: tuple[tuple[int, int], ...] = ()


class Model(_Struct, frozen=True):
    """What the model is: `kind` is llm, embedding or tensor. The later fields are for LLMs, and as far as they mean
    something for text encoders, whose `pooling` is one of `aotc.models.config.POOLINGS`."""

    name: str
    kind: str
    dtype: str
    family: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    num_layers: int = 0
    max_rows: int = 0
    max_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    parameters: int = 0
    batch_invariant: bool = False  # what a row of a decode step gets does not depend on how many there are
    pooling: str = ""
    normalize: bool = False  # embeddings have length 1


class Manifest(_Struct, frozen=True):
    """The whole. `sha256` covers the canonical JSON of all other fields."""

    format_version: int
    model: Model
    targets: tuple[TargetEntry, ...]
    weights: tuple[Weight, ...]
    weights_bytes: int
    weights_crc32: tuple[int, ...]
    files: dict[str, File]
    state: State | None = None
    kv_caches: tuple[KVCache, ...] = ()
    provenance: dict[str, str] = {}
    sha256: str = ""

    def weight_ranges(self, target: TargetEntry) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what a target needs of weights.bin: ascending, apart, at the starts of pages."""
        ranges = target.weights or ((0, self.weights_bytes),)
        return tuple((offset, min(nbytes, self.weights_bytes - offset)) for offset, nbytes in ranges)


def strides_of(manifest: Manifest) -> dict[str, int]:
    """Bytes between slots of the state, and between blocks of each layout of the KV cache, by `state` and layout."""
    state = manifest.state.slot_bytes if manifest.state else 0
    return {"state": state, **{c.layout: c.block_bytes for c in manifest.kv_caches}}


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with its own hash filled in; the same bytes for the same manifest."""
    return msgspec.json.format(
        msgspec.json.encode(msgspec.structs.replace(manifest, sha256=_digest(manifest))), indent=1
    )


def decode_manifest(data: bytes) -> Manifest:
    """Reads and checks a manifest. Raises ArtifactError: malformed, edited, or of another format version."""
    try:
        head = msgspec.json.decode(data, type=_Version)
        earlier = 1 <= head.format_version < FORMAT_VERSION and head.state is None
        if head.format_version != FORMAT_VERSION and not earlier:
            raise ArtifactError(
                f"the artifact has format version {head.format_version}, this aotc reads {FORMAT_VERSION}: "
                "compile the model again"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ArtifactError(f"manifest.json is malformed: {error}") from None
    if manifest.sha256 != _digest(manifest):
        raise ArtifactError("manifest.json was changed after it was written: compile the model again")
    _check(manifest)
    return manifest


class _Version(msgspec.Struct):
    format_version: int
    state: Any = None


def _digest(manifest: Manifest) -> str:
    plain: Any = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=""))
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def _check(m: Manifest) -> None:
    chunks = -(-m.weights_bytes // CHUNK_BYTES)
    if m.weights_bytes < 0 or len(m.weights_crc32) != chunks:
        raise ArtifactError("manifest.json is malformed: the checksums do not cover weights.bin")
    for w in m.weights:
        if w.offset < 0 or w.nbytes < 0 or w.offset + w.nbytes > m.weights_bytes:
            raise ArtifactError(f"manifest.json is malformed: weight {w.name} lies outside weights.bin")
    if m.state is not None:
        _check_fields("state", m.state.slot_bytes, m.state.fields)
    for cache in m.kv_caches:
        if cache.block_tokens < 1 or cache.layout not in KV_LAYOUTS:
            raise ArtifactError("manifest.json is malformed: a KV cache's layout")
        _check_fields("KV cache", cache.block_bytes, cache.fields)
    for target in m.targets:
        if target.arena_bytes < 0 or target.scratch_bytes < 0:
            raise ArtifactError(f"manifest.json is malformed: memory of {target.name}")
        _check_ranges(target, m.weights_bytes)
        for path in (target.library, *(p.plan for p in target.programs)):
            if path and path not in m.files:
                raise ArtifactError(f"manifest.json is malformed: {path} is not among its files")


def _check_ranges(target: TargetEntry, size: int) -> None:
    end = 0
    for offset, nbytes in target.weights:
        if not end <= offset < size or nbytes <= 0 or offset % PAGE or nbytes % PAGE or offset + nbytes >= size + PAGE:
            raise ArtifactError(f"manifest.json is malformed: the weights of {target.name}")
        end = offset + nbytes


def _check_fields(what: str, total: int, fields: tuple[StateField, ...]) -> None:
    if not 0 < total < 1 << 48:
        raise ArtifactError(f"manifest.json is malformed: the {what}'s size")
    for field in fields:
        size = math.prod(field.shape) * ITEM_BYTES.get(field.dtype, 1 << 48)
        if min(field.shape, default=0) < 0 or field.offset < 0 or field.offset + size > total:
            raise ArtifactError(f"manifest.json is malformed: {field.name} lies outside the {what}")
