"""What a call of a tiny tensor model costs on this CPU besides its arithmetic: `m(x)`, and `f()` of bound arrays.

    python -m benchmarks.call_cost [--calls 100000] [--json FILE]

The model is a policy of 16 x 32 x 32 x 4, batch 1: its arithmetic takes well below a microsecond. Peers are numpy on the
same weights, and onnxruntime where it is installed, with one thread. All take turns, a thousand calls each, so that what
else the machine does meets all of them. Times are microseconds; the clock's own is taken off.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import aotc
from aotc.cli import main as aotc_main

SIZES = (16, 32, 32, 4)
TURN = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = _calls(Path(folder))
        times = _measure(calls, options.calls)
    shown = {name: _summary(t) for name, t in times.items()}
    print(f"{'us':24}{'p50':>9}{'p99':>9}{'p99.9':>9}{'p99.9/p50':>11}")
    for name, (p50, p99, p999) in shown.items():
        print(f"{name:24}{p50:9.2f}{p99:9.2f}{p999:9.2f}{p999 / p50:11.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(shown, indent=1) + "\n")
    return 0


def _calls(folder: Path) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s).astype(np.float32) / 4 for s in zip(SIZES, SIZES[1:], strict=False)]
    onnx.save(_policy(weights), folder / "policy.onnx")
    if aotc_main(["compile", str(folder / "policy.onnx"), "--arch", "cpu", "-o", str(folder / "policy"), "--quiet"]):
        raise SystemExit(1)
    model = aotc.load(folder / "policy", device="cpu")
    obs = rng.standard_normal((1, SIZES[0])).astype(np.float32)
    action = np.zeros((1, SIZES[-1]), np.float32)
    bound = model.bind(obs=obs, action=action)
    bound()
    np.testing.assert_allclose(action, model(obs=obs)["action"])
    np.testing.assert_allclose(action, _by_numpy(obs, weights), rtol=1e-4, atol=1e-5)
    calls = {"f(), bound": bound, "m(obs=x)": lambda: model(obs=obs), "numpy": lambda: _by_numpy(obs, weights)}
    return calls | _onnxruntime(folder / "policy.onnx", obs)


def _policy(weights: list[np.ndarray]) -> onnx.ModelProto:
    nodes, at = [], "obs"
    for n in range(len(weights)):
        last = n == len(weights) - 1
        nodes.append(helper.make_node("MatMul", [at, f"w{n}"], ["action" if last else f"h{n}"]))
        at = f"r{n}"
        if not last:
            nodes.append(helper.make_node("Tanh", [f"h{n}"], [at]))
    ends = (("obs", SIZES[0]), ("action", SIZES[-1]))
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in ends)
    initial = [numpy_helper.from_array(w, f"w{n}") for n, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "policy", [given], [made], initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _by_numpy(x: np.ndarray, weights: list[np.ndarray]) -> np.ndarray:
    for w in weights[:-1]:
        x = np.tanh(x @ w)
    return x @ weights[-1]


def _onnxruntime(path: Path, obs: np.ndarray) -> dict[str, Callable[[], object]]:
    try:
        import onnxruntime  # type: ignore[import-not-found]
    except ImportError:
        return {}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return {"onnxruntime": lambda: session.run(None, {"obs": obs})}


def _measure(calls: dict[str, Callable[[], object]], count: int) -> dict[str, np.ndarray]:
    """Nanoseconds of each call, and of none."""
    everything = {"": lambda: None, **calls}
    times = {name: np.zeros(count, np.int64) for name in everything}
    clock = time.perf_counter_ns
    for begin in range(0, count, TURN):
        for name, call in everything.items():
            call()
            kept = times[name]
            for n in range(begin, min(begin + TURN, count)):
                start = clock()
                call()
                kept[n] = clock() - start
    nothing = int(np.median(times.pop("")))
    return {name: t - nothing for name, t in times.items()}


def _summary(times: np.ndarray) -> tuple[float, float, float]:
    p50, p99, p999 = np.percentile(times, (50, 99, 99.9)) / 1000
    return float(p50), float(p99), float(p999)


if __name__ == "__main__":
    raise SystemExit(main())
