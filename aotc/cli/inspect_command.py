"""Show what is in an artifact: programs, kernels, memory against its lower bound, and bytes moved a run."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", help="an artifact")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    from aotc.artifact.reader import open_artifact

    facts = describe(open_artifact(options.artifact))
    print(json.dumps(facts, indent=1) if options.json else _table(facts))
    return 0


def describe(artifact) -> dict[str, Any]:
    """Facts of an artifact. Bytes and operations of a program are those of its bucket full."""
    import msgspec

    from aotc.runtime.memory import weight_bytes

    m = artifact.manifest
    targets = []
    for target in m.targets:
        programs = [_program(artifact, target, p) for p in target.programs]
        targets.append({
            "name": target.name, "device": target.device, "arena_bytes": target.arena_bytes,
            "scratch_bytes_per_thread": target.scratch_bytes, "weights_bytes": weight_bytes(m, target),
            "memory": _memory(artifact, target), "programs": programs,
        })  # fmt: skip
    return {
        "model": msgspec.to_builtins(m.model), "format_version": m.format_version, "weights_bytes": m.weights_bytes,
        "weights": len(m.weights), "state_bytes_per_sequence": m.state.slot_bytes if m.state else 0,
        "kv_caches": [{k: v for k, v in msgspec.to_builtins(c).items() if k != "fields"} for c in m.kv_caches],
        "targets": targets,
    }  # fmt: skip


def _pooled(model: dict[str, Any]) -> str:
    """How a text encoder makes vectors."""
    if not model.get("pooling"):
        return ""
    length = ", normalised" if model.get("normalize") else ""
    return f", pooled by {model['pooling']}{length}, texts of up to {model['max_model_len']} tokens"


def _memory(artifact, target) -> dict[str, int] | None:
    """Bytes that a target takes on a GPU, by purpose, before any sequence; None for a CPU, where threads count too."""
    from dataclasses import asdict

    from aotc.runtime.buckets import Buckets
    from aotc.runtime.kv_cache import CachePlan, choose_cache
    from aotc.runtime.memory import decoder_memory, tensor_memory

    if target.device != "cuda":
        return None
    if artifact.manifest.state is not None:
        memory = decoder_memory(artifact.manifest, target, CachePlan(choose_cache(artifact.manifest, None), 0, 0, 0))
    else:
        memory = tensor_memory(artifact.manifest, target, artifact.plan(Buckets(target.programs).entries[-1].plan))
    names = {"scratch": "counters", "outputs": "results"}
    parts = {names.get(k, k): v for k, v in asdict(memory).items() if k not in ("state", "pinned", "kv_cache", "kv_blocks")}
    return {**parts, "total": memory.total}


def _program(artifact, target, entry) -> dict[str, Any]:
    from aotc.artifact.plan import evaluate

    plan = artifact.plan(entry.plan)
    full = {d.name: d.hi for d in plan.dims}
    if "tokens" in full:
        full["rows"] = 1  # one long prompt
    calls = list(plan.calls())
    touched = {(a.space, a.offset) for c in calls for a in c.args if type(a).__name__ == "Address" and a.space == 1}
    sizes = {w.offset: w.nbytes for w in artifact.manifest.weights}
    weights = sum(sizes[offset] for _, offset in touched)
    return {
        "name": entry.name, "calls": len(calls), "kernels": len({c.kernel for c in calls}),
        "barriers": sum(c.barrier for c in calls), "arena_bytes": plan.arena_bytes,
        "arena_lower_bound": plan.arena_lower_bound, "flops": sum(evaluate(c.flops, full) for c in calls),
        "bytes_moved": sum(evaluate(c.bytes, full) for c in calls), "weight_bytes": weights,
    }  # fmt: skip


def _table(facts: dict[str, Any]) -> str:
    mib = 1 << 20
    model = facts["model"]
    lines = [
        f"{model['name']}  {model['kind']} {model.get('family', '')} {model['dtype']}{_pooled(model)}",
        f"weights  {facts['weights_bytes'] / mib:.1f} MiB in {facts['weights']} tensors",
    ]
    for cache in facts["kv_caches"]:
        unit = "page" if cache["layout"] == "paged" else "sequence"
        size = f"{cache['block_bytes'] / mib:.2f} MiB a {unit} of {cache['block_tokens']} tokens"
        lines.append(f"cache    {cache['layout']}: {size}")
    for target in facts["targets"]:
        memory = target["memory"]
        if memory is None:
            lines.append(f"\n{target['name']}  weights {target['weights_bytes'] / mib:.1f} MiB, arena "
                         f"{target['arena_bytes'] / mib:.2f} MiB, scratch "
                         f"{target['scratch_bytes_per_thread'] / mib:.2f} MiB a thread")  # fmt: skip
        else:
            parts = ", ".join(f"{name} {size / mib:.2f}" for name, size in memory.items())
            each = " and the cache of each sequence" if facts["state_bytes_per_sequence"] else ""
            lines.append(f"\n{target['name']}  MiB on the GPU: {parts}{each}")
        lines.append(f"  {'program':<20}{'calls':>6}{'kernels':>9}{'barriers':>10}{'arena MiB':>11}{'bound':>8}"
                     f"{'GFLOP':>9}{'MiB moved':>11}{'weights':>9}")  # fmt: skip
        for p in target["programs"]:
            lines.append(
                f"  {p['name']:<20}{p['calls']:>6}{p['kernels']:>9}{p['barriers']:>10}{p['arena_bytes'] / mib:>11.2f}"
                f"{p['arena_lower_bound'] / mib:>8.2f}{p['flops'] / 1e9:>9.2f}{p['bytes_moved'] / mib:>11.1f}"
                f"{p['weight_bytes'] / mib:>9.1f}"
            )
    return "\n".join(lines)
