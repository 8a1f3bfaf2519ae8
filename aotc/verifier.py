"""`aotc verify`: an artifact against its checksums, its interpreter, and the model that it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from aotc.artifact.manifest import ProgramEntry, strides_of
from aotc.artifact.reader import Artifact
from aotc.frontend.model import Model, read_logical
from aotc.harness import Difference, check_calls, relative_error
from aotc.ir.dtypes import DTYPES
from aotc.ir.graph import Graph
from aotc.ir.interpret import interpret
from aotc.ir.packing import PACKINGS
from aotc.ir.program import area_of
from aotc.ir.text import parse_graph
from aotc.passes import lower
from aotc.passes.plan_memory import plan_memory
from aotc.runtime.devices.cpu import CpuLibrary, thread_count
from aotc.runtime.executor import CpuExecutor
from aotc.runtime.sampling import SAMPLER_DTYPE, SamplingParams, fill_row
from aotc.runtime.sequence import Request, Row, Sequence
from aotc.runtime.tensor_model import TensorModel

CONTEXT = 6  # tokens of the test prompt
PAGES = 3  # in the cache for each of its rows, more than it takes
SIZE = 3  # of a dynamic dim of a tensor model, within its bounds


@dataclass(frozen=True)
class Result:
    """What one check found: None where all is well."""

    name: str
    fault: str | None


def verify_artifact(artifact: Artifact, against: Model | None = None) -> Iterator[Result]:
    """Yields a result a check; `against` is the source traced in f32. Raises ArtifactError where a file is damaged."""
    for name in artifact.manifest.files:
        artifact.read(name)
    artifact.check_weights(artifact.map_weights(), thread_count())
    yield Result("checksums", None)
    weights = weight_reader(artifact)
    target = artifact.cpu_target()
    library = CpuLibrary(artifact.file(target.library), target.scratch_bytes)
    for entry in target.programs:
        graph = parse_graph(artifact.read(f"graphs/cpu/{entry.name}.ir").decode())
        yield Result(f"{target.name} {entry.name}", _check_program(artifact, entry, graph, weights, library))
    if against is not None:
        yield Result(f"against {against.name}", _check_source(artifact, against))


def weight_reader(artifact: Artifact) -> Callable[[str], np.ndarray]:
    """Reads logical weights out of an artifact, by key."""
    data = artifact.map_weights()
    entries = {w.name: w for w in artifact.manifest.weights}

    def read(key: str) -> np.ndarray:
        w = entries[key]
        array = data[w.offset : w.offset + w.nbytes].view(DTYPES[w.dtype].np)
        if w.packing is None:
            return array.reshape(w.shape)
        layout = PACKINGS[w.packing]
        return layout.unpack(array.reshape(layout.physical_shape(w.shape)), w.shape)

    return read


def decoder_inputs(graph: Graph, rows: int, each: int, start: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A greedy step of `rows` sequences with `each` new tokens after `start` cached ones, caches filled at random."""
    rng = np.random.default_rng(seed)
    types = {v.name: v.type for v in graph.inputs}
    vocab, tokens = int(str(graph.output("logits").type.shape[-1])), rows * each
    settings = np.zeros(rows, SAMPLER_DTYPE)
    for r in range(rows):
        fill_row(settings[r], SamplingParams(temperature=0), seed=0, prompt_len=start + each)
    int32 = {
        "tokens": rng.integers(0, vocab, tokens), "positions": np.tile(np.arange(start, start + each), rows),
        "rows": np.repeat(np.arange(rows), each), "query_start": np.arange(rows + 1) * each,
        "seq_lens": np.full(rows, start + each), "kv_index": rng.permutation(rows),
    }  # fmt: skip
    inputs = {k: v.astype(np.int32) for k, v in int32.items()}
    inputs["sampler"] = settings.view(np.uint8).reshape(rows, -1)
    if "block_table" in types:
        table = np.zeros((rows, int(str(types["block_table"].shape[1]))), np.int32)
        used = min(PAGES, table.shape[1])
        table[:, :used] = rng.permutation(rows * PAGES).reshape(rows, PAGES)[:, :used]
        inputs["block_table"] = table
    for name, type_ in types.items():
        if name not in inputs:
            shape = (rows * (PAGES if area_of(type_) == "paged" else 1), *type_.shape[1:])
            noise = rng.standard_normal(shape) if type_.dtype.is_float else np.zeros(shape)  # type: ignore[arg-type]
            inputs[name] = noise.astype(type_.dtype.np)
    return inputs


def tensor_inputs(graph: Graph, dims: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of a graph: normal floats, integers from 0 to 3, fair bools."""
    rng = np.random.default_rng(seed)
    inputs = {}
    for value in graph.inputs:
        shape = value.type.at(dims).ints
        noise = rng.standard_normal(shape) if value.type.dtype.is_float else rng.integers(0, 4, shape)
        inputs[value.name] = (noise > 1 if value.type.dtype.name == "bool" else noise).astype(value.type.dtype.np)
    return inputs


def _check_program(
    artifact: Artifact, entry: ProgramEntry, graph: Graph, weights: Callable[[str], np.ndarray], library: CpuLibrary
) -> str | None:
    state, program = artifact.manifest.state, plan_memory(lower(graph))
    if state is None:
        dims = {d.name: min(d.hi, max(d.lo, SIZE)) for d in graph.dims}
        inputs = tensor_inputs(graph, dims)
    else:
        rows, each, start = (min(entry.bucket, 3), 1, CONTEXT) if entry.kind == "decode" else (2, CONTEXT, 0)
        inputs = decoder_inputs(graph, rows, each, start)
        every = {"rows": rows, "tokens": rows * each, "slots": rows, "pages": PAGES * rows}
        dims = {d.name: every[d.name] for d in graph.dims}
    strides = strides_of(artifact.manifest)
    return _say([d for d in check_calls(program, inputs, weights, dims, library, strides) if d is not None])


def _say(found: list[Difference]) -> str | None:
    return f"{found[0]}, and {len(found) - 1} more" if found else None


def _check_source(artifact: Artifact, model: Model) -> str | None:
    """Logits of the artifact, run on this CPU, against the traced source in f32, interpreted on the same prompt; of a
    text encoder, its vectors."""
    if model.kind == "embedding":
        return _check_encoder(artifact, model)
    executor = CpuExecutor(artifact, 1)
    graph = model.graph
    inputs = decoder_inputs(graph, 1, CONTEXT, 0)
    ids = inputs["tokens"].tolist()
    sequence = Sequence(Request("verify", tuple(ids), SamplingParams(temperature=0)), 0, ids)
    executor.start(sequence)
    ours = executor.step([Row(sequence, 0, CONTEXT, True)]).logits[:1]
    theirs = interpret(graph, inputs, lambda k: read_logical(model.weights, k))["logits"]
    error = relative_error(ours, theirs)
    limit = 1e-4 if artifact.manifest.model.dtype == "f32" else 2e-2
    return None if error <= limit else f"logits differ by {error:.2g} (limit {limit:g})"


def _check_encoder(artifact: Artifact, model: Model) -> str | None:
    vocab = artifact.manifest.model.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab, (2, CONTEXT), np.int32)
    inputs = {"input_ids": ids, "lengths": np.array([CONTEXT, CONTEXT // 2], np.int32)}
    with TensorModel(artifact, device="cpu") as program:
        ours = program(**inputs)["embeddings"]
    theirs = interpret(model.graph, inputs, lambda k: read_logical(model.weights, k))["embeddings"]
    error = relative_error(ours, theirs)
    limit = 1e-5 if artifact.manifest.model.dtype == "f32" else 2e-2
    return None if error <= limit else f"embeddings differ by {error:.2g} (limit {limit:g})"
