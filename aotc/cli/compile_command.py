"""Compile MODEL into an artifact: a folder that `aotc run`, `aotc serve` and `aotc.load` take.

MODEL is a .gguf file, a Hugging Face folder, a hub id (org/name) or an .onnx file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotc import backends
    from aotc.codegen.cuda.tables import Table
    from aotc.frontend.model import Model
    from aotc.passes.layout_kv import KVLayout
    from aotc.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--arch", required=True, metavar="A[,B]", help="cpu, x86-64-v3, x86-64-v4, sm80, sm90, h100, ..."
    )
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the artifact's folder")
    parser.add_argument("--schedules", action="append", default=[], metavar="FILE",
                        help="a table of `aotc tune`, asked before the one that comes with aotc")  # fmt: skip
    parser.add_argument(
        "--workspace-size", metavar="BYTES", help="most memory for what lives within a step, such as 512MiB"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which programs a model becomes."""
    parser.add_argument("model", metavar="MODEL", help=".gguf file, Hugging Face folder, hub id or .onnx file")
    parser.add_argument("--dtype", choices=["bf16", "f16", "f32", "auto"], default="auto",
                        help="type of a model; auto: the checkpoint's, of which f32 becomes bf16 in language models")  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="most tokens of a sequence (model's, at most 8192)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="most sequences of a step")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="most tokens of a step")
    parser.add_argument("--kv-layout", choices=["static", "paged", "both"], default="both",
                        help="layouts of the KV cache that there are programs for")  # fmt: skip
    parser.add_argument("--kv-page-size", "--block-size", type=int, default=64, metavar="N",
                        help="tokens of a page, a power of two from 16 on")  # fmt: skip
    parser.add_argument("--batch-invariant", action="store_true",
                        help="on GPUs, the bits of a row of a decode step do not depend on how many rows there are")  # fmt: skip
    parser.add_argument("--persistent-kernel", choices=["auto", "on", "off"], default="auto",
                        help="on: linear layers of up to 64 rows that follow one another are one kernel, whose blocks stay "
                             "(sm90); auto: where it was measured to be faster, which is nowhere yet")  # fmt: skip
    parser.add_argument("--weights", metavar="random:SEED", help="make the weights from the config alone")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=LO..HI",
                        help="bounds of a dynamic dimension of an ONNX model")  # fmt: skip
    parser.add_argument("--batch-sizes", metavar="N[,N]",
                        help="rows that an ONNX model has programs for (on GPUs 1, 4, 16, ...; on CPUs one for all)")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(options: argparse.Namespace) -> int:
    from aotc.artifact.writer import ArtifactWriter
    from aotc.cli.options import parse_bytes
    from aotc.errors import RequestError
    from aotc.target import parse_targets

    begin = time.perf_counter()
    targets = parse_targets(options.arch)
    tables = _tables(options.schedules, targets)
    if options.persistent_kernel == "on" and any(t.name != "sm90" for t in targets):
        raise RequestError("--persistent-kernel on is for sm90: leave it out, or the others out of --arch")
    if options.batch_invariant and any(t.device != "cuda" for t in targets):
        raise RequestError("--batch-invariant is for GPUs: leave it out, or the CPU out of --arch")
    workspace = None if options.workspace_size is None else parse_bytes("--workspace-size", options.workspace_size)
    shown, note = (silent, unsaid) if options.quiet else (Progress(), say)
    with interruptible(shown) as progress, ArtifactWriter(options.output) as writer:
        progress("read and trace", 0, 1)
        model, compile_options = open_model(options)
        compile_options = replace(compile_options, tables=tables, workspace_bytes=workspace)
        progress("read and trace", 1, 1)
        _add_text_files(model, writer)
        from aotc.compiler import compile_model

        manifest = compile_model(model, targets, writer, compile_options, progress, note)
    if not options.quiet:
        _summary(options.output, manifest, time.perf_counter() - begin)
    return 0


@contextlib.contextmanager
def interruptible(progress: backends.Progress) -> Iterator[backends.Progress]:
    """The first signal that asks for an end raises KeyboardInterrupt, so that the writer removes its temporary folder;
    later ones do not disturb that. Where the exception was lost, in a finalizer, the next progress raises it again.
    Signals that are ignored, as under nohup, stay so."""
    asked = False

    def interrupt(*_: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt

    def checked(stage: str, done: int, total: int) -> None:
        if asked:
            raise KeyboardInterrupt
        progress(stage, done, total)

    if threading.current_thread() is not threading.main_thread():  # only that one takes signals
        yield progress
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield checked
    finally:
        for number, handler in before.items():
            if not asked:  # else the process ends, and late signals do not disturb that either
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _tables(paths: list[str], targets: tuple[Target, ...]) -> tuple[Table, ...]:
    """The tables of `--schedules`. Raises RequestError for one that no target would ask."""
    if not paths:
        return ()
    from aotc.codegen.cuda.tables import read_table
    from aotc.errors import RequestError

    tables = tuple(read_table(path) for path in paths)
    for path, table in zip(paths, tables, strict=True):
        if table.arch not in {t.name for t in targets}:
            raise RequestError(f"--schedules {path} is for {table.arch}, which --arch does not name: leave it out")
    return tables


def open_model(options: argparse.Namespace):
    """The model and its compile options. Raises AotcError."""
    from aotc.compiler import Options, buckets

    if str(options.model).endswith(".onnx"):
        _refuse(options, "an ONNX model", dtype="auto", max_model_len=None, weights=None, revision=None,
                kv_layout="both", kv_page_size=64, batch_invariant=False, persistent_kernel="auto")  # fmt: skip
        from aotc.frontend.onnx import open_onnx

        sizes = parse_batch_sizes(options.batch_sizes)
        made = open_onnx(options.model, parse_dims(options.dim), max(sizes, default=0))
        return made, Options(batch_sizes=sizes)
    _refuse(options, "a language model", dim=[], batch_sizes=None)
    encoder = _encoder_folder(options)
    if encoder is not None:
        return _open_encoder(options, encoder), Options()
    from aotc.frontend.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(options.model, revision=options.revision, weights=options.weights)
    from aotc.frontend.decoder import MAX_ROWS, MAX_TOKENS, trace_decoder

    config = checkpoint.config
    most = config.max_position_embeddings
    length = _between(options, "max_model_len", most, min(most, 8192), least=2)  # a token of the prompt, and an answer
    rows = _between(options, "max_num_seqs", MAX_ROWS, 64)
    tokens = min(_between(options, "max_num_batched_tokens", MAX_TOKENS, 2048), length)
    dtype = ("bf16" if config.dtype == "f32" else config.dtype) if options.dtype == "auto" else options.dtype
    if options.dtype == "auto" and config.dtype == "f32" and not options.quiet:
        print("the checkpoint is f32 or quantised: compiling as bf16 (--dtype f32 keeps f32)", file=sys.stderr)
    made = replace(
        buckets(rows, tokens, _layouts(options)), batch_invariant=options.batch_invariant,
        persistent_kernel=options.persistent_kernel == "on",
    )  # fmt: skip
    return trace_decoder(checkpoint, dtype, length), made


def _encoder_folder(options: argparse.Namespace) -> Path | None:
    """The folder of a text encoder, where the model is one. Raises SourceError for a hub id that cannot be had."""
    from aotc.frontend.checkpoint import FILES
    from aotc.frontend.encoder_checkpoint import is_encoder
    from aotc.frontend.huggingface import find_in_hub

    path = Path(options.model)
    if path.is_file() or (not path.exists() and path.suffix in FILES):
        return None
    folder = path if path.is_dir() else find_in_hub(options.model, options.revision, weights=options.weights is None)
    return folder if is_encoder(folder) else None


def _open_encoder(options: argparse.Namespace, folder: Path) -> Model:
    """A text encoder, traced. It keeps the checkpoint's dtype unless another one is asked for."""
    _refuse(options, "a text encoder", kv_layout="both", kv_page_size=64, batch_invariant=False,
            persistent_kernel="auto", max_num_batched_tokens=2048)  # fmt: skip
    from aotc.frontend.encoder import MAX_BATCH, trace_encoder
    from aotc.frontend.encoder_checkpoint import open_encoder, random_encoder

    spec = options.weights
    checkpoint = open_encoder(folder) if spec is None else random_encoder(open_encoder(folder, random=True), spec)
    config = checkpoint.config
    length = _between(options, "max_model_len", config.max_position_embeddings, checkpoint.max_length, least=3)
    batch = _between(options, "max_num_seqs", MAX_BATCH, 64)
    return trace_encoder(checkpoint, config.dtype if options.dtype == "auto" else options.dtype, batch, length)


def _layouts(options: argparse.Namespace) -> tuple[KVLayout, ...]:
    """The layouts of the KV cache that were asked for. Raises RequestError for a page size that no kernel takes."""
    from aotc.errors import RequestError
    from aotc.passes.layout_kv import MIN_PAGE_SIZE, KVLayout

    size = options.kv_page_size
    if not MIN_PAGE_SIZE <= size <= 1 << 15 or size & (size - 1):
        raise RequestError(f"--kv-page-size {size} is no power of two from {MIN_PAGE_SIZE} to {1 << 15}")
    names = ("static", "paged") if options.kv_layout == "both" else (options.kv_layout,)
    return tuple(KVLayout(name, size) for name in names)


def _refuse(options: argparse.Namespace, what: str, **unset: object) -> None:
    """Raises RequestError for a flag that means nothing for this kind of model."""
    from aotc.errors import RequestError

    for name, value in unset.items():
        if getattr(options, name) != value:
            raise RequestError(f"--{name.replace('_', '-')} does not apply to {what}: leave it out")


def _between(options: argparse.Namespace, name: str, most: int, default: int, least: int = 1) -> int:
    """A flag's number, or the default where it is not given. Raises RequestError unless it is `least` to `most`."""
    from aotc.errors import RequestError

    value = getattr(options, name)
    if value is None:
        return default
    if not least <= value <= most:
        flag = f"--{name.replace('_', '-')}"
        raise RequestError(f"{flag} {value} is not between {least} and {most}, the most for this model")
    return value


def parse_dims(items: list[str]) -> dict[str, tuple[int, int]]:
    """`--dim batch=1..8` and `--dim batch=4` as bounds. Raises RequestError."""
    from aotc.errors import RequestError

    dims = {}
    for item in items:
        name, _, bounds = item.partition("=")
        low, _, high = bounds.partition("..")
        if (
            not name
            or not low.isdecimal()
            or (high and not high.isdecimal())
            or int(low) < 1
            or int(high or low) < int(low)
        ):
            raise RequestError(f"--dim {item}: write NAME=LO..HI or NAME=N, for example --dim batch=1..8")
        dims[name] = (int(low), int(high or low))
    return dims


def parse_batch_sizes(text: str | None) -> tuple[int, ...]:
    """`--batch-sizes 1,4,16` as numbers. Raises RequestError."""
    from aotc.errors import RequestError

    sizes = [] if text is None else text.split(",")
    for size in sizes:
        if not size.strip().isdecimal() or int(size) < 1:
            raise RequestError(f"--batch-sizes {text}: write numbers from 1 on, for example --batch-sizes 1,4,16")
    return tuple(sorted({int(size) for size in sizes}))


def _add_text_files(model: Model, writer) -> None:
    from aotc.frontend.tokenizer_json import compact

    if model.encoder is not None:
        writer.add_file("tokenizer.json", compact(model.encoder.tokenizer_json))
    checkpoint = model.checkpoint
    if checkpoint is None:
        return
    from aotc.frontend.checkpoint import generation_config

    if checkpoint.tokenizer_json is not None:
        writer.add_file("tokenizer.json", compact(checkpoint.tokenizer_json))
    if checkpoint.chat_template is not None:
        writer.add_file("chat_template.jinja", checkpoint.chat_template.encode())
    config = generation_config(checkpoint)
    if config:
        writer.add_file("generation_config.json", json.dumps(config, sort_keys=True).encode())


def silent(stage: str, done: int, total: int) -> None:
    pass


def unsaid(line: str) -> None:
    pass


def say(line: str) -> None:
    print(line, file=sys.stderr)


class Progress:
    """One line a stage on standard error; it is rewritten in place on a terminal."""

    def __init__(self) -> None:
        self._terminal, self._begin = sys.stderr.isatty(), time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        spent = time.perf_counter() - self._begin
        line = f"{spent:6.1f} s  {stage:<28} {done}/{total}"
        if self._terminal:
            print(f"\r{line}\033[K", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total:
            print(line, file=sys.stderr, flush=True)


def _summary(output: str, manifest, seconds: float) -> None:
    mib = 1 << 20
    lines = [f"{output}: {manifest.model.name}, weights {manifest.weights_bytes / mib:.1f} MiB"]
    for target in manifest.targets:
        lines.append(f"  {target.name}: {len(target.programs)} programs, arena {target.arena_bytes / mib:.2f} MiB")
    for cache in manifest.kv_caches:
        unit = "page of" if cache.layout == "paged" else "sequence of up to"
        lines.append(
            f"  {cache.layout} KV cache: {cache.block_bytes / mib:.2f} MiB a {unit} {cache.block_tokens} tokens"
        )
    print("\n".join([*lines, f"  compiled in {seconds:.1f} s"]), file=sys.stderr)
