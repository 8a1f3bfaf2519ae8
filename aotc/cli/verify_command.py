"""Check an artifact: every checksum, every kernel of every program against the interpreter, and, with --against,
the logits of the model that it was compiled from. Needs the compiler's packages (pip install aotc[compile])."""

from __future__ import annotations

import argparse
import sys


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
        from aotc.frontend.checkpoint import open_checkpoint
        from aotc.frontend.decoder import trace_decoder

        entry = artifact.manifest.model
        model = trace_decoder(open_checkpoint(options.against), "f32", entry.max_model_len)
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
