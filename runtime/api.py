"""`aotc.load`: an artifact becomes a model that answers in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aotc.artifact.reader import open_artifact


def load(path: str | Path, **options: Any) -> Any:
    """Loads an artifact and returns it warm: an LLM (`generate`, `stream`) or a TensorModel (call it with arrays).

    Options of LLMs: `max_num_seqs` (4) bounds the sequences that run at once; `device` is cpu, cuda or auto (the GPU
    where there is one and the artifact has code for it). Tensor models run on the CPU. Raises ArtifactError and DeviceError.
    """
    artifact = open_artifact(path)
    if artifact.manifest.model.kind == "llm":
        from aotc.runtime.llm import LLM

        llm = LLM(artifact, **options)
        llm.warm()
        return llm
    from aotc.runtime.tensor_model import TensorModel

    return TensorModel(artifact, **options)
