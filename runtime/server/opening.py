"""From `--model NAME=PATH,device=cuda:0` to a model that is ready to be served."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

from aotc.artifact.reader import Artifact, open_artifact
from aotc.errors import ArtifactError, RequestError
from aotc.runtime.chat_template import ChatTemplate
from aotc.runtime.devices.opening import DEVICE, DEVICES
from aotc.runtime.kv_cache import choose_cache, parse_bytes
from aotc.runtime.server.engine_client import LOAD_SECONDS, EngineClient
from aotc.runtime.server.metrics import Metrics, ModelMetrics
from aotc.runtime.server.served import ServedModel
from aotc.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelOptions:
    """What is said of one model on the command line. Raises RequestError for what cannot be."""

    name: str
    path: str
    device: str
    max_num_seqs: int  # or as many as the model was compiled for, if those are fewer
    kv_layout: str | None = None
    kv_cache_memory: str | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.path:
            raise RequestError(f"--model {self.name}={self.path}: write NAME=DIR")
        if not DEVICE.fullmatch(self.device):
            raise RequestError(f"device={self.device}: choose {DEVICES}")
        if self.max_num_seqs < 1:
            raise RequestError("max-num-seqs is at least 1")
        if self.kv_layout not in (None, "static", "paged"):
            raise RequestError(f"kv-layout={self.kv_layout}: choose static or paged")
        parse_bytes(self.kv_cache_memory)  # refused here, not by the engine's process


def parse_model(text: str, usual: ModelOptions) -> ModelOptions:
    """`NAME=DIR[,KEY=VALUE]...` with the keys device, max-num-seqs, kv-layout and kv-cache-memory; what is not said is
    as in `usual`. Raises RequestError."""
    first, *rest = text.split(",")
    name, equals, path = first.partition("=")
    if not equals:
        raise RequestError(f"--model {text}: write NAME=DIR, and ,KEY=VALUE after it for options")
    changes: dict[str, Any] = {}
    for part in rest:
        key, _, value = part.partition("=")
        if key not in ("device", "max-num-seqs", "kv-layout", "kv-cache-memory") or not value:
            raise RequestError(
                f"--model {text}: {part!r} is no option: write device=, max-num-seqs=, kv-layout= or kv-cache-memory="
            )
        changes[key.replace("-", "_")] = value
    if "max_num_seqs" in changes:
        if not changes["max_num_seqs"].isdecimal():
            raise RequestError(f"--model {text}: max-num-seqs is a number")
        changes["max_num_seqs"] = int(changes["max_num_seqs"])
    return replace(usual, name=name, path=path, **changes)


def open_model(
    options: ModelOptions, metrics: Metrics, load_timeout: float = LOAD_SECONDS, request_timeout: float | None = None
) -> ServedModel:
    """A model whose engine is started by the server. Raises ArtifactError and RequestError."""
    artifact = open_artifact(options.path)
    tokenizer, template, config = _text(artifact)
    choose_cache(artifact.manifest, options.kv_layout, "paged")
    engine = EngineClient(
        str(artifact.path), options.max_num_seqs, device=options.device, kv_layout=options.kv_layout,
        kv_cache_memory=options.kv_cache_memory, load_timeout=load_timeout,
    )  # fmt: skip
    limits = artifact.manifest.model
    return ServedModel(
        options.name, limits.max_model_len, limits.vocab_size, engine, tokenizer, template,
        ModelMetrics(metrics, options.name), config, request_timeout,
    )  # fmt: skip


def name_of(path: str) -> str:
    """The name of a model that has none: its folder's."""
    return os.path.basename(os.path.abspath(path))


def _text(artifact: Artifact) -> tuple[Tokenizer, ChatTemplate | None, dict[str, Any]]:
    """Tokenizer, chat template (or None) and generation config of an artifact."""
    if artifact.manifest.model.kind != "llm" or not artifact.has("tokenizer.json"):
        raise ArtifactError(f"{artifact.path} is no language model with a tokenizer: serve needs one")
    config = {}
    if artifact.has("generation_config.json"):
        config = json.loads(artifact.read("generation_config.json"))
    tokenizer = Tokenizer(artifact.file("tokenizer.json"), config)
    template = None
    if artifact.has("chat_template.jinja"):
        source = artifact.read("chat_template.jinja").decode()
        bos, eos = config.get("bos_token", tokenizer.bos_token), config.get("eos_token", tokenizer.eos_token)
        template = ChatTemplate(source, bos_token=bos, eos_token=eos)
    return tokenizer, template, config
