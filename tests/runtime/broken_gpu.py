"""`broken_gpu.py FD ARTIFACT MAX_NUM_SEQS DEVICE`: an engine process on a fake GPU that fails in its first step, the
first time that ARTIFACT/../broken is not there."""

import os
import sys
from pathlib import Path

from fake_cuda import FakeDriver

from aotc.runtime.server import engine_process


class Driver(FakeDriver):
    def do_cuGraphLaunch(self, executable, stream):  # noqa: N802
        flag = Path(sys.argv[2]).parent / "broken"
        if not flag.exists():
            flag.touch()
            self.sticky = 700
        super().do_cuGraphLaunch(executable, stream)


sys.modules["cuda.bindings.driver"] = Driver()  # type: ignore[assignment]
code = engine_process.main(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
