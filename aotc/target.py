"""What code is compiled for: CPU levels and NVIDIA architectures, and how to tell what is here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aotc.errors import DeviceError, UnsupportedError


@dataclass(frozen=True)
class Target:
    """One target of an artifact. `features` are the /proc/cpuinfo flags that a CPU level needs."""

    name: str
    device: str
    features: frozenset[str] = frozenset()
    cards: tuple[str, ...] = ()


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}

CPU_TARGETS = (  # worst first
    Target("x86-64-v3", "cpu", _V3),
    Target("x86-64-v4", "cpu", _V4),
    Target("x86-64-v4-bf16", "cpu", _BF16),
    Target("x86-64-v4-amx", "cpu", _AMX),
)
CUDA_TARGETS = (
    Target("sm80", "cuda", cards=("a100", "a30")),
    Target("sm86", "cuda", cards=("a10", "a40", "rtx3090", "a6000")),
    Target("sm89", "cuda", cards=("l4", "l40", "l40s", "rtx4090")),
    Target("sm90", "cuda", cards=("h100", "h200", "gh200")),
    Target("sm100", "cuda", cards=("b100", "b200", "gb200")),
    Target("sm120", "cuda", cards=("rtx5090", "rtxpro6000")),
)
TARGETS = {t.name: t for t in (*CPU_TARGETS, *CUDA_TARGETS)}


@cache
def cpu_features() -> frozenset[str]:
    """Flags of this machine's CPU, as Linux gives them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    raise DeviceError("/proc/cpuinfo lists no CPU flags: aotc runs on x86-64 Linux")


def best_cpu_target(names: tuple[str, ...] | None = None) -> Target | None:
    """The best CPU level that this machine runs, among `names` where given."""
    fit = [t for t in CPU_TARGETS if t.features <= cpu_features() and (names is None or t.name in names)]
    return fit[-1] if fit else None


def parse_targets(text: str) -> tuple[Target, ...]:
    """Targets of `--arch`: names and cards, comma separated. `cpu` is this machine's level; `x86-64-v4` brings its
    bf16 and AMX variants. Raises UnsupportedError listing what there is."""
    found: dict[str, Target] = {}
    for word in filter(None, (w.strip().lower() for w in text.split(","))):
        for target in _targets_of(word):
            found[target.name] = target
    if not found:
        raise UnsupportedError(f"--arch names no target: choose from {_choices()}")
    return tuple(found.values())


def _targets_of(word: str) -> tuple[Target, ...]:
    if word == "cpu":
        best = best_cpu_target()
        if best is None:
            raise UnsupportedError("this CPU is older than x86-64-v3 (AVX2, FMA), the least that aotc compiles for")
        return (best,)
    if word == "x86-64-v4":
        return CPU_TARGETS[1:]
    if word in TARGETS:
        return (TARGETS[word],)
    by_card = next((t for t in CUDA_TARGETS if word in t.cards), None)
    if by_card is None:
        raise UnsupportedError(f"no target {word!r}: choose from {_choices()}")
    return (by_card,)


def _choices() -> str:
    cards = ", ".join(f"{t.name} ({', '.join(t.cards)})" for t in CUDA_TARGETS)
    return f"cpu, {', '.join(t.name for t in CPU_TARGETS)}, {cards}"
