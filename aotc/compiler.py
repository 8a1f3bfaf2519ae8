"""Compiles a model into an artifact: front end, passes, codegen, weights, manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aotc.artifact.manifest import FORMAT_VERSION, KVCache, Manifest, State, StateField
from aotc.artifact.manifest import Model as ModelEntry
from aotc.artifact.writer import ArtifactWriter
from aotc.backends import BACKENDS, Backend, Progress, Work
from aotc.errors import RequestError, UnsupportedError
from aotc.frontend.model import Model, read_logical
from aotc.ir.graph import Graph
from aotc.ir.interpret import interpret
from aotc.ir.packing import PACKINGS as LAYOUTS
from aotc.ir.program import Program, area_of
from aotc.ir.templates import Templates
from aotc.passes import (
    MODEL_PASSES,
    PACKINGS,
    PROGRAM_PASSES,
    KVLayout,
    canonicalize,
    cone,
    defer_norms,
    fuse,
    layout_kv,
    lower,
    pack_weights,
    spell_out,
    split_weights,
)
from aotc.passes.fuse import PACKED
from aotc.passes.runner import run_passes
from aotc.passes.specialise import batch, batch_dim, decode, extend
from aotc.planner import Placement
from aotc.target import Target

if TYPE_CHECKING:
    from aotc.codegen.cuda.tables import Table


@dataclass(frozen=True)
class Options:
    """What the user chose. Buckets bound the rows of decode programs and the tokens of extend programs; there are
    programs for each of the layouts of the KV cache. `batch_sizes` bound the rows of a tensor model's programs."""

    decode_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    extend_buckets: tuple[int, ...] = (128, 512, 2048)
    kv_layouts: tuple[KVLayout, ...] = (KVLayout("static"), KVLayout("paged"))
    tables: tuple[Table, ...] = ()  # of schedules, later ones first
    workspace_bytes: int | None = None  # that a program's arena may take
    batch_sizes: tuple[int, ...] = ()  # none: what is usual for a device
    batch_invariant: bool = False  # the same schedules for all buckets of a kind (CUDA)
    persistent_kernel: bool = False  # linear layers that follow one another become phases of one kernel (CUDA)


def buckets(max_rows: int, max_tokens: int, kv_layouts: tuple[KVLayout, ...] = Options.kv_layouts) -> Options:
    """Options with the usual buckets up to these bounds, the bounds included."""
    rows, tokens = Options().decode_buckets, Options().extend_buckets
    return Options(
        (*(b for b in rows if b < max_rows), max_rows), (*(b for b in tokens if b < max_tokens), max(max_tokens, 1)),
        kv_layouts,
    )  # fmt: skip


def compile_model(
    model: Model, targets: tuple[Target, ...], writer: ArtifactWriter, options: Options, progress: Progress,
    note: Callable[[str], None] = lambda _: None,
) -> Manifest:  # fmt: skip
    """Writes the artifact of a model and returns its manifest (committed). `note` takes lines that the user should
    read. Raises AotcError."""
    graph = optimise(model, progress)
    state, caches = state_of(graph), caches_of(graph, options.kv_layouts) if model.kind == "llm" else ()
    areas = {"state": state, **{c.layout: c for c in caches}}
    states = {area: {f.name: f.offset for f in at.fields} for area, at in areas.items() if at is not None}
    weights: dict[str, int] = {}
    entries = []
    for device in dict.fromkeys(t.device for t in targets):
        backend = BACKENDS[device]()
        prologue, programs = device_programs(graph, model, backend, options, progress)
        work = Work(
            programs=programs,
            strides={"state": state.slot_bytes if state else 0, **{c.layout: c.block_bytes for c in caches}},
            placement=Placement(weights, states),
            writer=writer,
            progress=progress,
            tables=options.tables,
            batch_invariant=options.batch_invariant,
            persistent_kernel=options.persistent_kernel,
            note=note,
        )
        for target in targets:
            if target.device == device and options.workspace_bytes is not None:
                _require_fit(backend.arena_bytes(target, work), target, options.workspace_bytes)
        _write_weights(prologue, model, writer, progress, weights)
        for program in work.programs:
            writer.add_file(f"graphs/{device}/{program.name}.ir", (str(program.graph) + "\n").encode())
        entries += [backend.write(target, work) for target in targets if target.device == device]
    manifest = Manifest(
        format_version=FORMAT_VERSION, model=_model_entry(model, options), targets=tuple(entries), weights=(),
        weights_bytes=0, weights_crc32=(), files={}, state=state, kv_caches=caches,
    )  # fmt: skip
    return writer.commit(manifest)


def _require_fit(arena_bytes: dict[str, int], target: Target, most: int) -> None:
    """Raises UnsupportedError, saying the least that would do, where a program's arena is larger than `most`."""
    name = max(arena_bytes, key=lambda n: arena_bytes[n])
    if arena_bytes[name] > most:
        advice = ", or fewer tokens a step with --max-num-batched-tokens" if "extend_" in name else ""
        raise UnsupportedError(
            f"--workspace-size {most} is too small: program {name} of {target.name} takes {arena_bytes[name]} bytes, "
            f"the most of its {len(arena_bytes)}: say --workspace-size {arena_bytes[name]}{advice}"
        )


def optimise(model: Model, progress: Progress) -> Graph:
    """The model's graph after the passes that hold for every device."""
    progress("optimise", 0, 1)
    graph = run_passes(model.graph, MODEL_PASSES, "model")
    progress("optimise", 1, 1)
    return graph


def device_programs(
    graph: Graph, model: Model, backend: Backend, options: Options, progress: Progress
) -> tuple[Graph, list[Program]]:
    """(what depends on weights alone, programs) of an optimised graph for one device."""
    device = backend.device
    packed = run_passes(graph, [lambda g: pack_weights(g, PACKINGS[device])], device)
    prologue, main = split_weights(packed)
    graphs = progress_over(list(_specialised(main, model, backend, options)), f"programs {device}", progress)
    templates = backend.templates
    if options.batch_invariant:  # a norm within the layer, or behind it, rounds otherwise than one before it
        templates = replace(templates, norm_rows=0, scaled_rows=0)
    return prologue, [make_program(g, templates) for g in graphs]


def make_program(graph: Graph, templates: Templates = PACKED) -> Program:
    """A specialised graph as a planned program, fused for what a target's templates compute."""

    def defer_norms_for_target(g: Graph) -> Graph:
        return defer_norms(g, templates)

    def fuse_for_target(g: Graph) -> Graph:
        return fuse(g, templates)

    def spell_out_for_target(g: Graph) -> Graph:
        return spell_out(g, templates.whole)

    passes = (spell_out_for_target, canonicalize, defer_norms_for_target, fuse_for_target)
    program = lower(run_passes(graph, passes, graph.name))
    for function in PROGRAM_PASSES:
        program = function(program)
    return program


def _specialised(main: Graph, model: Model, backend: Backend, options: Options) -> Iterator[Graph]:
    if model.kind != "llm":
        sizes = _batch_sizes(main, backend, options)
        yield from (batch(main, rows) for rows in sizes) if len(sizes) > 1 else (main,)
        return
    for layout in options.kv_layouts:
        laid = run_passes(main, [lambda g, at=layout: layout_kv(g, at)], f"kv_{layout.layout}")
        prefix = "" if layout.layout == "static" else f"{layout.layout}_"
        made = [decode(laid, rows) for rows in options.decode_buckets]
        made += [extend(laid, tokens, max(options.decode_buckets)) for tokens in options.extend_buckets]
        yield from (replace(g, name=prefix + g.name) for g in made)


def _batch_sizes(main: Graph, backend: Backend, options: Options) -> tuple[int, ...]:
    """Rows that the programs of a tensor model take, ascending, the dim's bound included; none: one program for all.
    Raises RequestError where the user asks for sizes that the model can't have."""
    try:
        dim = batch_dim(main)
    except RequestError:
        if options.batch_sizes:
            raise
        return ()
    for size in options.batch_sizes:
        if not max(dim.lo, 1) <= size <= dim.hi:
            said = f"--batch-sizes {size} is outside the bounds of dim {dim.name}, {dim.lo} to {dim.hi}"
            raise RequestError(f"{said}: leave it out, or move the bounds with --dim {dim.name}=LO..HI")
    sizes = options.batch_sizes or [size for size in backend.batch_sizes(dim.hi) if size >= dim.lo]
    return tuple(sorted({*sizes, dim.hi}))


def state_of(graph: Graph) -> State | None:
    """The layout of a slot: what is no KV cache."""
    size, fields = _fields(graph, "state")
    return State(size, fields) if fields else None


def caches_of(graph: Graph, layouts: tuple[KVLayout, ...]) -> tuple[KVCache, ...]:
    """The layouts of the KV cache of a language model."""
    caches = []
    for layout in layouts:
        laid = layout_kv(graph, layout)
        size, fields = _fields(laid, layout.layout)
        caches.append(KVCache(layout.layout, size, fields[0].shape[2], fields))
    return tuple(caches)


def _fields(graph: Graph, area: str) -> tuple[int, tuple[StateField, ...]]:
    """The linear inputs of an area, each without its first axis, one after the other; bytes of all."""
    fields, offset = [], 0
    names = {source for _, source in graph.aliases}
    for value in graph.inputs:
        if value.name in names and area_of(value.type) == area:
            shape = tuple(int(s) for s in value.type.shape[1:])  # type: ignore[arg-type]
            fields.append(StateField(value.name, value.type.dtype.name, shape, offset))
            offset += -(-math.prod(shape) * value.type.dtype.itemsize // 64) * 64
    return offset, tuple(fields)


def _write_weights(
    prologue: Graph, model: Model, writer: ArtifactWriter, progress: Progress, offsets: dict[str, int]
) -> None:
    """Evaluates the prologue one weight at a time and writes each in its layout; fills `offsets` by key.

    What another device of the artifact wrote under the same key is shared.
    """
    missing = [key for key in prologue.output_names if key not in offsets]
    for key in progress_over(missing, "weights", progress):
        part = cone(prologue, key)
        array = interpret(part, {}, lambda k: read_logical(model.weights, k))[key]
        type_ = part.outputs[0].type
        if type_.packing is not None:
            pack = LAYOUTS[type_.packing].pack
            assert pack is not None, f"no packer for {type_.packing}"
            array = pack(array)
        offsets[key] = writer.add_weight(key, type_.dtype.name, type_.ints, type_.packing, array).offset


def _model_entry(model: Model, options: Options) -> ModelEntry:
    parameters = sum(math.prod(w.value.type.ints) for w in model.graph.weights)
    if model.encoder is not None:
        c, batch = model.encoder.config, next(d.hi for d in model.graph.dims if d.name == "batch")
        return ModelEntry(
            model.name, model.kind, model.dtype, c.family, c.vocab_size, model.max_model_len, c.num_hidden_layers, batch,
            parameters=parameters, pooling=c.pooling, normalize=c.normalize,
        )  # fmt: skip
    if model.config is None:
        return ModelEntry(model.name, model.kind, "")
    c = model.config
    dtype = next(v.type.dtype.name for v in model.graph.inputs if v.name == "kv.0")
    return ModelEntry(
        model.name, model.kind, dtype, c.family, c.vocab_size, model.max_model_len, c.num_hidden_layers,
        max(options.decode_buckets), max(options.extend_buckets), c.eos_token_ids,
        parameters=parameters, batch_invariant=options.batch_invariant,
    )  # fmt: skip


def progress_over(items: list, stage: str, progress: Progress) -> Iterable:
    """Yields the items, reporting each when it is done."""
    progress(stage, 0, len(items))
    for n, item in enumerate(items):
        yield item
        progress(stage, n + 1, len(items))
