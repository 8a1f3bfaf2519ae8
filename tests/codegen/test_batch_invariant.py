"""What a row gets does not depend on the other rows of its step, to the bit: one schedule for all batch sizes."""

import json

import numpy as np
import pytest

from aotc.artifact.reader import open_artifact
from aotc.backends import BACKENDS
from aotc.cli import main
from aotc.codegen.cuda.fake_device import run_program
from aotc.codegen.cuda.launch import dim_order, render_program, slot_layout, widest_dims
from aotc.compiler import Options, device_programs, optimise
from aotc.cuda_replay import CudaReplay
from aotc.frontend.checkpoint import open_checkpoint
from aotc.frontend.decoder import trace_decoder
from aotc.ir.interpret import interpret
from aotc.passes import MODEL_PASSES, cone, split_weights
from aotc.passes.layout_kv import KVLayout
from aotc.passes.runner import run_passes
from aotc.tuner import jobs_of
from aotc.verifier import decoder_inputs

BATCHES = (1, 2, 5, 20)
CONFIG = {
    "num_hidden_layers": 1,
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


@pytest.fixture(scope="module", params=[32, 64], ids=["attention_decode", "flash_decode"])
def model(request, tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("invariant")
    config = {**tiny_config, **CONFIG, "head_dim": request.param, "intermediate_size": 576}
    (folder / "config.json").write_text(json.dumps(config))
    return trace_decoder(open_checkpoint(str(folder), weights="random:3"), "bf16", 64)


def programs_of(model, batch_invariant, layouts=("static",)):
    options = Options(BATCHES, (16, 64), tuple(KVLayout(n, 16) for n in layouts), batch_invariant=batch_invariant)
    quiet = lambda *_: None  # noqa: E731
    return device_programs(optimise(model, quiet), model, BACKENDS["cuda"](), options, quiet)[1]


def sources_of(programs, kind, batch_invariant):
    """Sources of the programs of a kind: a dict by kernel name for each."""
    chosen = [p for p in programs if p.name.startswith(kind)]
    strides, dims = slot_layout(chosen[0]).strides, dim_order(programs)
    widest = lambda p: widest_dims(p, programs) if batch_invariant else ()  # noqa: E731
    return [render_program(p, "sm90", dims, strides, None, widest(p)) for p in chosen]


def linear(sources):
    return [sorted(s.symbol for s in of.values() if s.symbol.startswith("matmul")) for of in sources]


@pytest.mark.parametrize("kind", ["decode", "extend", "paged_decode", "paged_extend"])
def test_linear_layers_are_the_same_kernels_in_all_buckets(model, kind):
    programs = programs_of(model, True, ("static", "paged"))
    first, *others = linear(sources_of(programs, kind, True))
    assert first and all(other == first for other in others)
    assert len({tuple(s) for s in linear(sources_of(programs_of(model, False, ("static", "paged")), kind, False))}) > 1


def test_attention_takes_the_same_splits_in_all_buckets(model):
    def splits(batch_invariant):
        made = sources_of(programs_of(model, batch_invariant), "decode", batch_invariant)
        return {s.grid[2] for of in made for s in of.values() if s.symbol.startswith("attention_decode")}

    assert len(splits(True)) == 1 and len(splits(False)) > 1


def test_row_0_is_the_same_to_the_bit_in_batches_of_1_2_and_5(model):
    graph = run_passes(model.graph, MODEL_PASSES, "model")
    prologue, _ = split_weights(graph)
    from aotc.frontend.model import read_logical

    weights = {
        key: interpret(cone(prologue, key), {}, lambda k: read_logical(model.weights, k))[key]
        for key in prologue.output_names
    }
    read = lambda k: weights[k] if k in weights else read_logical(model.weights, k)  # noqa: E731

    def answers(batch_invariant):
        programs = {p.name: p for p in programs_of(model, batch_invariant)}
        largest = programs["decode_5"]
        inputs = decoder_inputs(largest.graph, 5, 1, 40)
        inputs["kv_index"] = np.arange(5, dtype=np.int32)
        inputs["seq_lens"] = np.array([41, 3, 30, 17, 8], np.int32)
        inputs["positions"] = inputs["seq_lens"] - 1
        found = []
        for rows in (1, 2, 5):
            program = programs[f"decode_{rows}"]
            short = {n: inputs[n] for n in inputs}
            for n in ("tokens", "positions", "rows", "seq_lens", "kv_index", "sampler"):
                short[n] = inputs[n][:rows]
            short["query_start"] = inputs["query_start"][: rows + 1]
            widest = widest_dims(program, programs.values()) if batch_invariant else ()
            found.append(run_program(program, short, read, "sm90", widest))
        return found

    one, two, five = answers(True)
    for name in ("logits", "token", "kv.0"):
        for other in (two, five):
            np.testing.assert_array_equal(one[name][0], other[name][0], err_msg=name)
    assert np.isfinite(one["logits"].astype(np.float32)).all() and one["logits"].any()
    loose = answers(False)
    assert any((loose[0]["logits"][0] != other["logits"][0]).any() for other in loose[1:])


def test_tuning_measures_the_shape_classes_that_such_an_artifact_asks_for(model):
    programs = programs_of(model, True)
    keys = [j.key for j in jobs_of(programs, "sm90", True)]
    assert all(key.split()[1] in ("20", "64") for key in keys), keys
    assert not any(key.endswith("norm") for key in keys)


def test_the_manifest_says_so_and_plans_replay(model, tmp_path, tiny_config):
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config, "num_hidden_layers": 1}))
    arguments = ["compile", str(tmp_path), "--weights", "random:7", "--arch", "sm90", "--dtype", "bf16", "--quiet"]
    arguments += ["--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--kv-layout", "static"]
    assert main([*arguments, "--batch-invariant", "-o", str(tmp_path / "artifact")]) == 0
    artifact = open_artifact(tmp_path / "artifact")
    assert artifact.manifest.model.batch_invariant
    (target,) = artifact.manifest.targets
    replay, used = CudaReplay(artifact, target), set()
    for entry in target.programs:
        plan = artifact.plan(entry.plan)
        used |= {k.symbol for k in plan.kernels}
    assert used <= set(replay._sources)


@pytest.mark.parametrize("arch", ["cpu", "sm90,x86-64-v3"])
def test_a_cpu_is_refused(arch, tmp_path, capfd):
    assert main(["compile", "m", "--arch", arch, "--batch-invariant", "-o", str(tmp_path / "o")]) == 2
    assert capfd.readouterr().err.startswith("aotc: error: --batch-invariant is for GPUs: leave it out")
