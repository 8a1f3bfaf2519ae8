"""CPU attention over static and paged caches matches the interpreter, on every level that runs here."""

import numpy as np
import pytest
from attention_cases import SLOTS, attention_graph, page_up, ragged

from aotc.ir.dtypes import bf16, f32
from aotc.target import CPU_TARGETS, cpu_features

LEVELS = [t.name for t in CPU_TARGETS if t.features <= cpu_features()]
WIDE = (6, 2, 64, None, [70, 6, 150, 9], [70, 1, 3, 9])
WINDOW = (4, 1, 32, 37, [150, 17, 90, 33], [120, 17, 1, 33])
PLAIN = (4, 4, 24, 5, [70, 6, 80, 9], [70, 0, 1, 9])
"""heads, kv_heads, d (a multiple of 32, but for the plain kernel), window, length of each row, new tokens of each."""


def inputs_of(graph, lengths, new):
    rng = np.random.default_rng(1)
    inputs = ragged(lengths, new)
    sizes = {"tokens": sum(new), "rows": len(new), "slots": SLOTS}
    for v in graph.inputs:
        if v.name not in inputs:
            inputs[v.name] = rng.standard_normal(v.type.at(sizes).ints).astype(v.type.dtype.np)
    return inputs


@pytest.mark.parametrize(("case", "page_size"), [(WIDE, 64), (WIDE, 16), (WINDOW, 32)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_attention(check_cpu, level, dtype, case, page_size):
    """Pages are cut where blocks of positions are, and where they are not."""
    hold(check_cpu, dtype, level, case, page_size)


@pytest.mark.parametrize("page_size", [None, 16])
def test_attention_of_odd_heads(check_cpu, page_size):
    hold(check_cpu, f32, LEVELS[-1], PLAIN, page_size)


def hold(check_cpu, dtype, level, case, page_size):
    """Ragged rows, then one token a row: the kernel has a path of its own for those."""
    heads, kv_heads, d, window, lengths, new = case
    static = attention_graph(dtype, heads, kv_heads, d, window, decode=False, context=160)
    for counts in (new, [1] * len(new)):
        graph, inputs = page_up(static, inputs_of(static, lengths, counts), page_size)
        stride = -(-inputs["kv"][0].nbytes // 64) * 64 + 128
        found, program = check_cpu(graph, inputs, level=level, strides={"static": stride, "paged": stride})
        assert sorted(k.family for k in program.kernels.values()) == ["attention", "kv_append"]
        assert found == [], counts
