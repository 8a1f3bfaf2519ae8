"""Where results are written: found out, and found to be possible, before anything is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from aotc.errors import RequestError
from aotc.loadtest import plot as plots
from aotc.loadtest.session import Load


@dataclass(frozen=True)
class ResultFiles:
    """Folder and name of the figures (an empty name is made up), and the plot; None for what is not asked for."""

    result: tuple[Path, str] | None
    plot: Path | None

    def named(self, model: str, load: Load) -> Path:
        """The file of the figures; a made-up name is like vLLM's."""
        assert self.result is not None
        folder, name = self.result
        if not name:
            limit = "" if load.concurrency is None else f"-concurrency{load.concurrency}"
            when = time.strftime("%Y%m%d-%H%M%S")
            name = f"openai-{load.rate:g}qps{limit}-{model.rpartition('/')[2]}-{when}.json"
        return folder / name


def choose_files(name: str | None, folder: str | None, filename: str | None, plot: str | None) -> ResultFiles:
    """`name` is what stands after --save-result: None where it was not given, empty where nothing does.

    Makes the folder. Raises RequestError or OSError where a file could not be written in the end, ModuleNotFoundError
    where matplotlib is not there for the plot.
    """
    if name is None and (folder is not None or filename is not None):
        raise RequestError("--result-dir and --result-filename go with --save-result")
    result = None
    if name is not None:
        path = Path(folder or ".", name or filename or "")
        result = (path.parent, path.name) if name or filename else (path, "")
        result[0].mkdir(parents=True, exist_ok=True)
        if path.is_dir() and result[1]:
            raise RequestError(f"--save-result {path} is a folder: name a file, or give it as --result-dir")
    if plot is None:
        return ResultFiles(result, None)
    plots.check()
    if not Path(plot).absolute().parent.is_dir():
        raise RequestError(f"--plot {plot}: there is no such folder")
    return ResultFiles(result, Path(plot))
