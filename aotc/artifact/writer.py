"""Writes an artifact: into a temporary folder beside the target, renamed when whole."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from aotc.artifact.checksum import crc32
from aotc.artifact.manifest import CHUNK_BYTES, PAGE, File, Manifest, Weight, encode_manifest
from aotc.errors import ArtifactError

ALIGNMENT = 64
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


class ArtifactWriter:
    """Context manager. Leaving it without `commit`, by an error or a signal, leaves nothing behind."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.files: dict[str, File] = {}
        self.weights: list[Weight] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._crc: list[int] = []
        self._filled = 0  # bytes in the last, unfinished chunk
        self._weights_bytes = 0
        self._stream: BinaryIO | None = None
        self._made: list[Path] = []  # parents that were not there, innermost first

    def __enter__(self) -> ArtifactWriter:
        with _explained(self.path):
            self.path = self.path.resolve()  # a link stays, what it names is replaced
            _require_replaceable(self.path)
            parent = self.path.parent
            self._made = [p for p in (parent, *parent.parents) if not p.exists()]
            try:
                parent.mkdir(parents=True, exist_ok=True)
                _remove_stale(self.path)
                self.folder = parent / f".{self.path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
                self.folder.mkdir()
                self._stream = open(self.folder / "weights.bin", "wb")
                with contextlib.suppress(OSError):  # held while this writer lives; some file systems have none
                    fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a full disk fails here again, and was reported
                self._stream.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)
        for parent in self._made:
            with contextlib.suppress(OSError):
                parent.rmdir()  # fails where something is inside: the artifact

    def add_file(self, path: str, data: bytes) -> None:
        """Adds a file at a relative path, forward slashes."""
        with _explained(self.path):
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        self.files[path] = File(len(data), hashlib.sha256(data).hexdigest())

    def add_weight(
        self, name: str, dtype: str, shape: tuple[int, ...], packing: str | None, array: np.ndarray
    ) -> Weight:
        """Appends a tensor in its physical layout; one with the same bytes as an earlier one shares its place."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        key = hashlib.blake2b(data, digest_size=32).digest()
        if key not in self._places:
            self._pad(PAGE if len(data) >= 1 << 20 else ALIGNMENT)
            self._places[key] = (self._weights_bytes, len(data))
            self._append(data)
        offset, nbytes = self._places[key]
        self.weights.append(Weight(name, dtype, shape, offset, nbytes, packing))
        return self.weights[-1]

    def commit(self, manifest: Manifest) -> Manifest:
        """Completes the manifest with files, weights and checksums, and puts the folder in its place."""
        assert self._stream is not None
        with _explained(self.path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            manifest = msgspec.structs.replace(
                manifest, files=dict(sorted(self.files.items())), weights=tuple(self.weights),
                weights_bytes=self._weights_bytes, weights_crc32=tuple(self._crc),
            )  # fmt: skip
            self.add_file("manifest.json", encode_manifest(manifest))
            _put_in_place(self.folder, self.path)
        return manifest

    def _pad(self, alignment: int) -> None:
        self._append(memoryview(bytes(-self._weights_bytes % alignment)))

    def _append(self, data: memoryview) -> None:
        assert self._stream is not None
        with _explained(self.path):
            self._stream.write(data)
        self._weights_bytes += len(data)
        while len(data):
            if self._filled == 0:
                self._crc.append(0)
            part = data[: CHUNK_BYTES - self._filled]
            self._crc[-1] = crc32(part, self._crc[-1])
            self._filled = (self._filled + len(part)) % CHUNK_BYTES
            data = data[len(part) :]


def _require_replaceable(path: Path) -> None:
    if not path.exists() or (path / "manifest.json").is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise ArtifactError(f"{path} exists and is no artifact: name another folder with -o")


def _put_in_place(folder: Path, path: Path) -> None:
    """Renames; an older artifact is exchanged in one step, so that readers see one or the other."""
    with _locked(path):
        if not path.exists():
            os.rename(folder, path)
        elif not _exchange(folder, path):
            old = folder.with_name(folder.name + ".old")
            os.rename(path, old)
            os.rename(folder, path)
            shutil.rmtree(old, ignore_errors=True)
        # After an exchange the old one is in the temporary folder, which the writer removes.


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time puts a folder in its place."""
    lock = path.parent / f".{path.name}.lock"
    while True:
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it before removed it: another writer may hold a newer one of that name.
            if not lock.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    lock.unlink()
            return


def _exchange(a: Path, b: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _remove_stale(path: Path) -> None:
    """Removes what killed compiles of the same name left: folders that no live process writes."""
    pattern = re.compile(re.escape(f".{path.name}.tmp-") + r"(\d+)-[0-9a-f]+(\.old)?$")
    for entry in path.parent.iterdir():
        match = pattern.match(entry.name)
        # In a container every compile may have the same process id.
        if not match or (int(match[1]) != os.getpid() and Path(f"/proc/{match[1]}").exists()) or _is_locked(entry):
            continue
        if match[2] and not path.exists():  # killed between two renames: the only whole artifact
            os.rename(entry, path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    """Whether a writer in another container, whose process id means nothing here, holds the folder."""
    try:
        with open(folder / "weights.bin", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(
            f"cannot write {path}: {error.strerror or error}: free space or name another folder"
        ) from None
