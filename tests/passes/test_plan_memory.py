"""The memory planner: no live buffers overlap, and plans are near the lower bound."""

from hypothesis import given
from hypothesis import strategies as st

from aotc.passes.plan_memory import Interval, check_plan, lower_bound, place


@st.composite
def intervals(draw):
    count = draw(st.integers(1, 25))
    spans = [sorted((draw(st.integers(0, 30)), draw(st.integers(0, 30)))) for _ in range(count)]
    return [Interval(f"b{i}", draw(st.integers(1, 50)) * 64, lo, hi) for i, (lo, hi) in enumerate(spans)]


@given(intervals())
def test_live_buffers_never_share_bytes(items):
    offsets = place(items)
    check_plan(items, offsets)
    assert max(offsets[i.name] + i.size for i in items) >= lower_bound(items)


def test_a_chain_needs_two_buffers():
    chain = [Interval(f"b{i}", 64, i, i + 1) for i in range(100)]
    offsets = place(chain)
    assert max(offsets.values()) + 64 == lower_bound(chain) == 128
