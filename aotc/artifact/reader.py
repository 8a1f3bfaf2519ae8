"""Opens an artifact: checks everything but the weights at once, maps those, and checks them while they are read."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from aotc.artifact.checksum import crc32
from aotc.artifact.manifest import CHUNK_BYTES, Manifest, TargetEntry, decode_manifest
from aotc.artifact.plan import Plan, decode_plan
from aotc.errors import ArtifactError
from aotc.target import best_cpu_target

MAX_MANIFEST = 64 << 20


class Artifact:
    """An open artifact. Files read through it were checked against the manifest."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    def read(self, name: str) -> bytes:
        """A file's bytes. Raises ArtifactError when its size or hash differs."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise ArtifactError(f"{self.path} has no {name}")
        data = _read(self.path, name, entry.size)
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactError(
                f"{self.path / name} is damaged (wrong checksum): compile the model again or copy it again"
            )
        return data

    def has(self, name: str) -> bool:
        return name in self.manifest.files

    def plan(self, name: str) -> Plan:
        """A program's plan, by its path."""
        return decode_plan(self.read(name))

    def file(self, name: str) -> Path:
        """The path of a file for a library that opens it itself, after a check."""
        self.read(name)
        return self.path / name

    def cpu_target(self) -> TargetEntry:
        """The best CPU target that this machine runs. Raises ArtifactError listing what is inside."""
        inside = {t.name: t for t in self.manifest.targets if t.device == "cpu"}
        best = best_cpu_target(tuple(inside))
        if best is None:
            here = best_cpu_target()
            names = ", ".join(t.name for t in self.manifest.targets)
            raise ArtifactError(
                f"{self.path} was compiled for {names}; this CPU is {here.name if here else 'older than x86-64-v3'}: "
                f"compile it with --arch {here.name if here else 'x86-64-v3'}"
            )
        return inside[best.name]

    def map_weights(self, check: bool = True, target: TargetEntry | None = None) -> np.ndarray:
        """weights.bin as read-only bytes, mapped. Raises ArtifactError when its size or, with `check`, a checksum
        differs; the check reads what `target` uses, or the whole, once."""
        with self.open_weights() as file:
            size = self.manifest.weights_bytes
            mapped = mmap.mmap(file, size, prot=mmap.PROT_READ) if size else b""
        weights = np.frombuffer(mapped, np.uint8)
        if check:
            self.check_weights(weights, len(os.sched_getaffinity(0)), self.chunks_of(target) if target else None)
        return weights

    @contextlib.contextmanager
    def open_weights(self) -> Iterator[int]:
        """The descriptor of weights.bin, for reading. Raises ArtifactError when its size differs, and for what goes wrong
        with the file inside."""
        path = _inside(self.path, "weights.bin")
        with _readable(path), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.manifest.weights_bytes:
                raise ArtifactError(
                    f"{path} has {size} bytes, the manifest says {self.manifest.weights_bytes}: copy the artifact again"
                )
            yield file.fileno()

    def chunks_of(self, target: TargetEntry) -> list[int]:
        """The chunks of weights.bin that hold something of a target, ascending."""
        ranges = self.manifest.weight_ranges(target)
        return sorted({c for at, n in ranges for c in range(at // CHUNK_BYTES, -(-(at + n) // CHUNK_BYTES))})

    def check_weights(self, weights: np.ndarray, threads: int, chunks: list[int] | None = None) -> None:
        """Compares the checksum of every chunk, or of those named. Raises ArtifactError naming the first damaged
        weight."""
        chunks = list(range(len(self.manifest.weights_crc32))) if chunks is None else chunks

        def damaged(chunk: int) -> bool:
            part = weights[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            return crc32(part.data) != self.manifest.weights_crc32[chunk]

        with ThreadPoolExecutor(threads) as pool:
            for chunk, bad in zip(chunks, pool.map(damaged, chunks), strict=True):
                if bad:
                    raise ArtifactError(
                        f"{self.path / 'weights.bin'} is damaged at {self._tensor_at(chunk)}: copy it again"
                    )

    def _tensor_at(self, chunk: int) -> str:
        first, last = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        names = [w.name for w in self.manifest.weights if w.offset < last and w.offset + w.nbytes > first]
        return names[0] if names else f"byte {first}"


def open_artifact(path: str | Path) -> Artifact:
    """Opens a folder. Raises ArtifactError for anything that is not a whole, unchanged artifact."""
    folder = Path(path)
    with _readable(folder):
        whole = (folder / "manifest.json").is_file()
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is no folder: compile a model into it with `aotc compile MODEL -o {folder}`")
    if not whole:
        raise ArtifactError(f"{folder} has no manifest.json: it is no artifact, or its compile did not finish")
    manifest = decode_manifest(_read(folder, "manifest.json", MAX_MANIFEST))
    for name, entry in manifest.files.items():
        found = _inside(folder, name)
        size = os.stat(found).st_size
        if size != entry.size:
            raise ArtifactError(f"{found} has {size} bytes, the manifest says {entry.size}: copy it again")
    return Artifact(folder, manifest)


def _inside(folder: Path, name: str) -> Path:
    """The path of a regular file whose real place is inside the folder."""
    path = folder / name
    if os.path.isabs(name) or ".." in Path(name).parts or os.path.normpath(name) != name:
        raise ArtifactError(f"{folder}: {name!r} leaves the artifact")
    if _is_plain(str(folder), name):
        return path
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except PermissionError:
        raise ArtifactError(f"{path} cannot be read: permission denied") from None
    except (OSError, ValueError):  # ValueError: a NUL in the name
        raise ArtifactError(f"{path} is missing: copy the artifact again") from None
    if not real.is_relative_to(folder.resolve()) or not regular:
        raise ArtifactError(f"{folder}: {name!r} leaves the artifact or is no file")
    return path


def _is_plain(folder: str, name: str) -> bool:
    """Whether a file is regular and no part of its name a link: twenty times faster than resolving it."""
    path, mode = folder, 0
    try:
        for part in name.split("/"):
            path = f"{path}/{part}"
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                return False
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode)


def _read(folder: Path, name: str, most: int) -> bytes:
    path = _inside(folder, name)
    with _readable(path), open(path, "rb") as file:
        return file.read(most + 1)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from None
