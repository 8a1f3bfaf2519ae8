"""`aotc.compile`: a traced PyTorch module becomes an artifact, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aotc.artifact.manifest import Manifest
from aotc.artifact.writer import ArtifactWriter
from aotc.compiler import Options, Progress, compile_model
from aotc.frontend.module import open_exported
from aotc.target import parse_targets

if TYPE_CHECKING:
    import torch


def compile(  # noqa: A001 - the name that users look for
    program: torch.export.ExportedProgram,
    output: str | Path,
    *,
    arch: str = "cpu",
    name: str = "module",
    batch_sizes: Sequence[int] = (),
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Compiles what `torch.export.export(module, args, dynamic_shapes=...)` returned into the folder `output`.

    `arch` is that of the command line. Raises AotcError. The artifact's inputs have the names of the module's
    arguments; its outputs are `output`, or `output_0`, `output_1`, ... `batch_sizes` are the rows that programs of a
    module with a dynamic batch take, one each; if there are none, GPUs have 1, 4, 16, ... and CPUs one program for all.
    """
    targets = parse_targets(arch)
    with ArtifactWriter(output) as writer:
        return compile_model(open_exported(program, name), targets, writer, Options(batch_sizes=tuple(batch_sizes)), progress)
