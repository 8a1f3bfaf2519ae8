"""`aotc.load`: an artifact becomes a model that answers in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aotc.runtime.devices.opening import begin_opening


def load(path: str | Path, *, device: str = "auto", **options: Any) -> Any:
    """Loads an artifact and returns it warm: an LLM (`generate`, `stream`), an Embedder (`embed`) or a
    TensorModel (call it with arrays).

    `device` is cpu, cuda, cuda:NUMBER or auto (the first GPU where there is one and the artifact has code for it). Of
    LLMs, `max_num_seqs` (4) bounds the sequences that run at once; `kv_layout` is static (a cache for each of them at
    its longest, and the usual one) or paged (pages that they take as they grow), and `kv_cache_memory`, as 2147483648
    or "2GiB", bounds the cache. Of the others, `max_batch_size`, `max_wait_ms`, `min_batch_size` and
    `preferred_batch_sizes` are for `submit` and `aembed`. All have `memory` and `close`, and are context managers.
    Raises ArtifactError and DeviceError.
    """
    opening = begin_opening(path, device)  # before the imports, which take as long as a context does
    from aotc.artifact.reader import open_artifact

    artifact = open_artifact(path)
    if artifact.manifest.model.kind == "llm":
        from aotc.runtime.llm import LLM

        llm = LLM(artifact, device=device, opening=opening, **options)
        llm.warm()
        return llm
    if artifact.manifest.model.kind == "embedding":
        from aotc.runtime.embedder import Embedder

        return Embedder(artifact, device=device, opening=opening, **options)
    from aotc.runtime.tensor_model import TensorModel

    return TensorModel(artifact, device=device, opening=opening, **options)
