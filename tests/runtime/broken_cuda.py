"""A fake driver whose GPU fails in the first step of the first process that uses it."""

from __future__ import annotations

import os
from pathlib import Path

from fake_cuda import FakeDriver


class BrokenDriver(FakeDriver):
    """`flag` is a file that is made when the GPU has failed."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = Path(flag)

    def do_cuGraphLaunch(self, executable: int, stream: int) -> None:  # noqa: N802
        if not self.flag.exists():
            self.flag.write_text(str(os.getpid()))
            self.sticky = 700
        super().do_cuGraphLaunch(executable, stream)
