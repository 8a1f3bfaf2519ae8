"""Check an artifact: every checksum, every kernel of every program against the interpreter, and, with --against,
the logits, or vectors, of the model that it was compiled from. Needs the compiler's packages (pip install aotc[compile])."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotc.artifact.manifest import Model as Entry
    from aotc.frontend.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", help="an artifact")
    parser.add_argument("--against", metavar="MODEL", help="the source: .gguf file, Hugging Face folder or hub id")


def run(options: argparse.Namespace) -> int:
    from aotc.artifact.reader import open_artifact
    from aotc.errors import ArtifactError
    from aotc.verifier import verify_artifact

    artifact = open_artifact(options.artifact)
    model = None
    if options.against:
        model = _source(options.against, artifact.manifest.model)
    faults = 0
    for result in verify_artifact(artifact, model):
        print(
            f"{'ok  ' if result.fault is None else 'FAIL'} {result.name}{': ' + result.fault if result.fault else ''}"
        )
        sys.stdout.flush()
        faults += result.fault is not None
    if faults:
        raise ArtifactError(f"{faults} of the checks of {options.artifact} failed")
    return 0


def _source(path: str, entry: Entry) -> Model:
    """The source, traced in f32 as the artifact's kind of model. Raises AotcError."""
    if entry.kind == "embedding":
        from aotc.frontend.encoder import trace_encoder
        from aotc.frontend.encoder_checkpoint import open_encoder

        return trace_encoder(open_encoder(Path(path)), "f32", entry.max_rows, entry.max_model_len)
    from aotc.frontend.checkpoint import open_checkpoint
    from aotc.frontend.decoder import trace_decoder

    return trace_decoder(open_checkpoint(path), "f32", entry.max_model_len)
