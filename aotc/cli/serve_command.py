"""Serve an artifact over OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

The model runs in a child process. Where it ends, with exit code 70 when the GPU failed in a step, another is started."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from aotc.cli.options import add_device, add_kv_cache

FIXED = {
    "--dtype": "--dtype", "--max-model-len": "--max-model-len", "--quantization": "--dtype",
    "--kv-cache-dtype": "--dtype", "--max-num-batched-tokens": "--max-num-batched-tokens",
    "--load-format": "--weights", "--revision": "--revision", "--block-size": "--kv-page-size",
}  # fmt: skip
"""vLLM's flags that compiling decides, and the flag of `aotc compile` that does."""
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", help="an artifact of a language model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    add_device(parser)
    add_kv_cache(parser, "paged")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (default: the folder's)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key that clients must send (default: AOTC_API_KEY)")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="most sequences at once")
    parser.add_argument(
        "--max-num-queued-reqs", type=int, default=256, metavar="N", help="more unfinished ones get a 429"
    )
    parser.add_argument("--shutdown-timeout", type=int, default=30, metavar="S", help="seconds to finish after SIGTERM")
    parser.add_argument(
        "--metrics-prefix", default="aotc", metavar="P", help="prefix of metrics; vllm for its dashboards"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="logging")
    parser.add_argument("--disable-access-log", action="store_true", help="do not log each request")
    for flag in FIXED:
        parser.add_argument(flag, nargs="?", const="", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from aotc import knobs
    from aotc.errors import RequestError

    for flag, compile_flag in FIXED.items():
        if getattr(options, flag[2:].replace("-", "_")) is not None:
            raise RequestError(f"{flag} is fixed at compile time: recompile with `aotc compile ... {compile_flag} ...`")
    if not 0 <= options.port <= 65535 or options.max_num_seqs < 1 or options.max_num_queued_reqs < 1:
        raise RequestError("--port is 0 to 65535, --max-num-seqs and --max-num-queued-reqs are at least 1")
    if options.shutdown_timeout < 0:
        raise RequestError("--shutdown-timeout is a number of seconds, 0 or more")
    if not _PREFIX.match(options.metrics_prefix):
        raise RequestError("--metrics-prefix is made of letters, digits and _, and begins with no digit")
    key = options.api_key or knobs.api_key()
    if key is None and options.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"aotc: warning: {options.host} is reachable by others and there is no --api-key", file=sys.stderr)
    return _serve(options, key)


def _serve(options: argparse.Namespace, key: str | None) -> int:
    from aotc.artifact.reader import open_artifact
    from aotc.errors import ArtifactError
    from aotc.runtime.kv_cache import choose_cache, parse_bytes
    from aotc.runtime.server.app import Server, Settings
    from aotc.runtime.server.engine_client import EngineClient
    from aotc.runtime.server.http import HttpServer, listen
    from aotc.runtime.server.metrics import Metrics

    artifact = open_artifact(options.artifact)
    model = options.served_model_name or os.path.basename(os.path.abspath(options.artifact))
    tokenizer, template, config = _text(artifact)
    limits = artifact.manifest.model
    settings = Settings(model, limits.max_model_len, limits.vocab_size, key, options.max_num_queued_reqs, config)
    parse_bytes(options.kv_cache_memory)  # refused here, not by the engine's process
    choose_cache(artifact.manifest, options.kv_layout, "paged")
    engine = EngineClient(
        str(artifact.path), options.max_num_seqs, device=options.device, kv_layout=options.kv_layout,
        kv_cache_memory=options.kv_cache_memory,
    )  # fmt: skip
    server = Server(settings, engine, tokenizer, template, Metrics(options.metrics_prefix, model))
    http = HttpServer(
        server, log_level=options.log_level, access_log=not options.disable_access_log,
        shutdown_timeout=options.shutdown_timeout,
    )  # fmt: skip

    def give_up() -> None:
        http.should_exit = True

    engine.on_failed = give_up
    with listen(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        print(f"aotc: serving {model} at http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr)
        http.run([listener])
    if engine.failed is not None:
        raise ArtifactError(engine.failed)
    return 0


def _text(artifact: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Tokenizer, chat template (or None) and generation config of an artifact."""
    import json

    from aotc.errors import ArtifactError
    from aotc.runtime.chat_template import ChatTemplate
    from aotc.runtime.tokenizer import Tokenizer

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
