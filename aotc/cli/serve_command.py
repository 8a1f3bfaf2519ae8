"""Serve artifacts over OpenAI's API (docs/serving.md): language models, and text encoders (/v1/embeddings).

Each language model runs in a child process. Where it ends, with exit code 70 when the GPU failed in a step, another is
started. Text encoders run in the server's own."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from typing import TYPE_CHECKING

from aotc.cli.options import ALL_SEQS, add_device, add_kv_cache

if TYPE_CHECKING:
    from aotc.runtime.server.opening import ModelOptions

FIXED = {
    "--dtype": "--dtype", "--max-model-len": "--max-model-len", "--quantization": "--dtype",
    "--kv-cache-dtype": "--dtype", "--max-num-batched-tokens": "--max-num-batched-tokens",
    "--load-format": "--weights", "--revision": "--revision", "--block-size": "--kv-page-size",
}  # fmt: skip
"""vLLM's flags that compiling decides, and the flag of `aotc compile` that does."""
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", nargs="?", help="an artifact of a language model or a text encoder")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=DIR[,device=cuda:0]",
        help="a model beside it, each in a process of its own; options: device, max-num-seqs, kv-layout, kv-cache-memory",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    add_device(parser)
    add_kv_cache(parser, "paged")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the name of DIR in the API (default: the folder's)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key that clients must send (default: AOTC_API_KEY)")
    parser.add_argument(
        "--max-num-seqs", type=int, default=ALL_SEQS, metavar="N",
        help="most sequences at once, a model, which never takes more than it was compiled for",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-queued-reqs", type=int, default=256, metavar="N", help="more unfinished ones of a model get a 429"
    )
    parser.add_argument(
        "--load-timeout", type=int, default=1800, metavar="S",
        help="seconds in which a model must load, else it is started again; 0: no limit",
    )  # fmt: skip
    parser.add_argument(
        "--request-timeout", type=int, default=0, metavar="S", help="seconds for an answer, else a 504; 0: no limit"
    )
    parser.add_argument(
        "--shutdown-timeout", type=int, default=30, metavar="S",
        help="seconds to finish after SIGTERM; a second one ends the server at once",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-prefix", default="aotc", metavar="P", help="prefix of metrics; vllm for its dashboards"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="logging")
    parser.add_argument(
        "--log-format", default="text", choices=["text", "json"], help="json: one object a line; no prompts in either"
    )
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
    if min(options.shutdown_timeout, options.load_timeout, options.request_timeout) < 0:
        raise RequestError("--shutdown-timeout, --load-timeout and --request-timeout are seconds, 0 or more")
    if not _PREFIX.match(options.metrics_prefix):
        raise RequestError("--metrics-prefix is made of letters, digits and _, and begins with no digit")
    key = options.api_key or knobs.api_key()
    if key is None and options.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"aotc: warning: {options.host} is reachable by others and there is no --api-key", file=sys.stderr)
    return _serve(options, key)


def _serve(options: argparse.Namespace, key: str | None) -> int:
    from aotc.artifact.reader import open_artifact
    from aotc.errors import ArtifactError
    from aotc.runtime.server import nvml
    from aotc.runtime.server.app import Server, Settings
    from aotc.runtime.server.embeddings import open_encoder
    from aotc.runtime.server.http import HttpServer, listen
    from aotc.runtime.server.logs import configure
    from aotc.runtime.server.metrics import Metrics
    from aotc.runtime.server.opening import open_model

    configure(options.log_format, options.log_level)
    metrics = Metrics(options.metrics_prefix)
    nvml.register(metrics.registry, options.metrics_prefix)
    timeouts = options.load_timeout, options.request_timeout or None
    models, encoders = [], []
    for model in _models(options):
        artifact = open_artifact(model.path)
        if artifact.manifest.model.kind == "embedding":
            encoders.append(open_encoder(artifact, model.name, model.device, timeouts[1]))
        else:
            models.append(open_model(model, metrics, *timeouts))
    server = Server(Settings(key, options.max_num_queued_reqs), models, metrics, encoders)
    http = HttpServer(
        server, log_level=options.log_level, access_log=not options.disable_access_log,
        shutdown_timeout=options.shutdown_timeout,
    )  # fmt: skip
    server.on_failure = http.give_up
    with listen(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        names = ", ".join([*server.served, *server.encoders])
        print(f"aotc: serving {names} at http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr)
        http.run([listener])
    if server.failure is not None:
        raise ArtifactError(server.failure)
    return 0


def _models(options: argparse.Namespace) -> list[ModelOptions]:
    """The models of the command line, DIR first. Raises RequestError where there is none, or two of one name."""
    from aotc.errors import RequestError
    from aotc.runtime.server.opening import ModelOptions, name_of, parse_model

    usual = ModelOptions(
        "-", "-", options.device, options.max_num_seqs, options.kv_layout, options.kv_cache_memory
    )  # fmt: skip
    models = [parse_model(text, usual) for text in options.model]
    if options.artifact is not None:
        name = options.served_model_name or name_of(options.artifact)
        models.insert(0, dataclasses.replace(usual, name=name, path=options.artifact))
    elif options.served_model_name is not None:
        raise RequestError("--served-model-name is the name of DIR: there is none")
    if not models:
        raise RequestError("there is no model: write `aotc serve DIR` or `aotc serve --model NAME=DIR`")
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two models are called {name}: give each a name of its own")
    return models
