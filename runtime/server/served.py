"""One of the models that a server serves: its limits, its text layer, its engine, and what is counted of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aotc.runtime.chat_template import ChatTemplate
from aotc.runtime.server.breaker import CircuitBreaker, State
from aotc.runtime.server.engine_client import EngineClient
from aotc.runtime.server.metrics import ModelMetrics
from aotc.runtime.tokenizer import Tokenizer


@dataclass(eq=False)
class ServedModel:
    """A language model under the name that requests ask for. `generation_config` holds its defaults of sampling."""

    name: str
    max_model_len: int
    vocab_size: int
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    metrics: ModelMetrics
    generation_config: dict[str, Any] = field(default_factory=dict)
    request_timeout: float | None = None  # seconds from a request's submission to the end of its answer
    starting: int = 0  # answers that were admitted and that the engine does not count yet
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    def __post_init__(self) -> None:
        self.engine.on_restart = self.metrics.engine_restarts.inc
        self.engine.on_load = self.metrics.absorb
        self.engine.on_memory = self.metrics.remember

    @property
    def status(self) -> str:
        """`ready` where a request that comes now is answered, else what is in its way."""
        if self.engine.failed is not None:
            return "failed"
        if not self.engine.ready.is_set():
            return "not ready"
        return "failing" if self.breaker.state is State.OPEN else "ready"

    def card(self) -> dict[str, Any]:
        """Its entry in /v1/models."""
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "aotc", "max_model_len": self.max_model_len}

    def measure(self) -> None:
        """Brings its gauges up to date."""
        self.metrics.update(self.engine.load, self.engine.unfinished, self.breaker.state.value)
