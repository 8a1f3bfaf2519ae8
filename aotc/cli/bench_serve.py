"""Load on a server of OpenAI's API, as `vllm bench serve`: URL is a server's (aotc, vLLM, llama-server), DIR an
artifact, for which a server is started on a free port and ended again."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from aotc.cli.options import ALL_SEQS, add_device, add_kv_cache

if TYPE_CHECKING:
    from aotc.loadtest.generator import Outcome
    from aotc.loadtest.goals import Verdict
    from aotc.loadtest.report import Figures
    from aotc.loadtest.session import Load, Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="URL|DIR", help="a server's address, or an artifact to serve")
    parser.add_argument("--model", metavar="NAME", help="the model to ask (default: the first of /v1/models)")
    parser.add_argument("--api-key", metavar="KEY", help="key to send (default: AOTC_API_KEY)")
    parser.add_argument(
        "--endpoint",
        choices=["/v1/completions", "/v1/chat/completions"],
        default="/v1/completions",
        help="what is asked",
    )
    _add_workload(parser)
    _add_results(parser)
    server = parser.add_argument_group("the server of a DIR")
    add_device(server)
    add_kv_cache(server, "paged")
    server.add_argument("--max-num-seqs", type=int, default=ALL_SEQS, metavar="N", help="most sequences at once")
    server.add_argument(
        "--ready-timeout", type=float, default=600, metavar="S", help="seconds that it may take to start"
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="requests")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help="a second; inf: all at once")
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="shape of the gaps' gamma distribution; 1: Poisson"
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at once; others wait unsent")
    group.add_argument(
        "--sweep", metavar="LOADS", help="a run for each of 1,4,16 requests at once, or of rate=1,2,4 a second"
    )
    group.add_argument("--dataset-name", choices=["random"], default="random", help="prompts of random tokens")
    group.add_argument("--random-input-len", type=int, default=1024, metavar="N", help="tokens of a prompt")
    group.add_argument("--random-output-len", type=int, default=128, metavar="N", help="tokens of an answer")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths are from n (1 - R) to n (1 + R)"
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with"
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, prompts and arrivals")
    group.add_argument("--temperature", type=float, default=0.0, help="of the answers")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers have their whole length"
    )
    group.add_argument("--extra-body", metavar="JSON", help="an object of more fields for every request")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before, which do not count")
    group.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds until a request has failed")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--goodput", nargs="+", metavar="TIME:MS", help="what a good request is, as ttft:500 tpot:30")
    group.add_argument(
        "--slo", metavar="GOALS", help="exit code 1 unless all hold, as ttft_p99=500ms,tpot_p99=30ms,device_mem=80%%"
    )
    group.add_argument("--metric-percentiles", default="90,99", metavar="P,P", help="percentiles to show")
    group.add_argument("--price-per-hour", type=float, metavar="X", help="of the machine, for the cost of a token")
    group.add_argument("--save-result", nargs="?", const="", metavar="FILE", help="write the figures as JSON")
    group.add_argument("--result-dir", metavar="DIR", help="where FILE, or a file with a name of its own, is written")
    group.add_argument("--result-filename", metavar="NAME", help="the name of FILE, as vLLM has it")
    group.add_argument("--save-detailed", action="store_true", help="times and errors of each request too")
    group.add_argument("--plot", metavar="FILE.svg", help="latency against the loads of --sweep (needs aotc[bench])")
    group.add_argument("--disable-tqdm", "--quiet", action="store_true", dest="quiet", help="no progress")


def run(options: argparse.Namespace) -> int:
    """0; 1 where a goal of --slo is missed, or no request was answered."""
    import asyncio
    import contextlib

    from aotc.loadtest.served import served
    from aotc.loadtest.session import measure

    plan = _Plan(options)
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        url = options.target
        if "://" not in url:
            url = stack.enter_context(served(url, _server_arguments(options), options.ready_timeout))
        progress = _Progress(options.num_prompts, len(plan.settings.loads), options.quiet)
        measured = asyncio.run(measure(url, plan.settings, _note, progress))
    progress.end()
    return plan.report(measured)


def _raise_file_limit() -> None:
    """Each request at once is a connection, and the usual limit of open files is 1024; servers inherit it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _note(line: str) -> None:
    print(f"aotc: note: {line}", file=sys.stderr)


def _server_arguments(options: argparse.Namespace) -> list[str]:
    waiting = str(max(256, options.num_prompts + options.num_warmups))
    arguments = [
        "--max-num-seqs",
        str(options.max_num_seqs),
        "--max-num-queued-reqs",
        waiting,
        "--device",
        options.device,
    ]
    for name in ("kv_layout", "kv_cache_memory"):
        if getattr(options, name) is not None:
            arguments += [f"--{name.replace('_', '-')}", getattr(options, name)]
    return [*arguments, "--log-level", "warning"]


class _Plan:
    """The options, checked before anything is started. Raises RequestError, and ModuleNotFoundError for --plot."""

    def __init__(self, options: argparse.Namespace) -> None:
        from aotc import knobs
        from aotc.errors import RequestError
        from aotc.loadtest.goals import parse_slo
        from aotc.loadtest.report import parse_goals
        from aotc.loadtest.result_files import choose_files
        from aotc.loadtest.session import Load, Settings, parse_sweep
        from aotc.loadtest.workload import Shape

        positive = options.request_rate, options.burstiness, options.timeout, options.ready_timeout
        if not all(value > 0 for value in positive):  # NaN is not
            raise RequestError("--request-rate, --burstiness, --timeout and --ready-timeout are greater than 0")
        if (options.max_concurrency or 1) < 1 or options.max_concurrency == 0 or options.num_warmups < 0:
            raise RequestError("--max-concurrency is at least 1, --num-warmups at least 0")
        if options.seed < 0 or not 0 <= options.temperature < math.inf:
            raise RequestError("--seed and --temperature are at least 0")
        if options.price_per_hour is not None and not 0 <= options.price_per_hour < math.inf:
            raise RequestError("--price-per-hour is a price, 0 or more")
        if options.plot and not options.sweep:
            raise RequestError("--plot shows the loads of a --sweep: give one, as --sweep 1,4,16")
        self.options = options
        self.statistics = _percentiles(options.metric_percentiles)
        self.goals = parse_slo(options.slo) if options.slo else ()
        self.goodput = parse_goals(options.goodput or ())
        base = Load(options.request_rate, options.max_concurrency, options.burstiness)
        self.kind, loads = parse_sweep(options.sweep, base)
        shape = Shape(
            options.num_prompts, options.random_input_len, options.random_output_len, options.random_range_ratio,
            options.random_prefix_len,
        )  # fmt: skip
        fields: dict[str, Any] = {"temperature": options.temperature}
        if options.ignore_eos:
            fields["ignore_eos"] = True
        fields |= _extra_body(options.extra_body)
        self.settings = Settings(
            options.endpoint, shape, loads, options.model, options.api_key or knobs.api_key(), options.seed,
            options.num_warmups, options.timeout, fields,
        )  # fmt: skip
        if options.save_detailed and options.save_result is None:
            raise RequestError("--save-detailed goes with --save-result")
        self.files = choose_files(options.save_result, options.result_dir, options.result_filename, options.plot)

    def report(self, measured: Measured) -> int:
        """Prints and writes what was measured; returns the exit code."""
        from aotc.loadtest.goals import judge
        from aotc.loadtest.report import summarise, sweep_table, table
        from aotc.loadtest.session import load_values

        options, loads = self.options, self.settings.loads
        figures = [summarise(outcomes, seconds, self.goodput) for outcomes, seconds in measured.runs]
        values = load_values(self.kind, loads)
        if options.sweep:
            print(sweep_table(self.kind, list(zip(values, figures, strict=True)), options.price_per_hour))
        else:
            print(table(figures[0], self._shown(loads[0]), self.statistics, options.price_per_hour))
        for (outcomes, _), run in zip(measured.runs, figures, strict=True):
            if run.failed:
                first = next(o.error for o in outcomes if o.error is not None)
                _note(f"{run.failed} of {len(outcomes)} requests failed; the first: {first}")
        verdicts = [judge(self.goals, run, measured.memory) for run in figures]
        for value, lines in zip(values, verdicts, strict=True):
            for verdict in lines:
                print(f"{self.kind} {value:g}: {verdict.line}" if options.sweep else verdict.line)
        self._write(measured, figures, values, verdicts)
        passed = all(v.passed for lines in verdicts for v in lines) and all(run.completed for run in figures)
        return 0 if passed else 1

    def _shown(self, load: Load) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if load.concurrency is not None:
            shown["Maximum request concurrency"] = load.concurrency
        if not math.isinf(load.rate):
            shown["Request rate configured (RPS)"] = float(load.rate)
        return shown

    def _write(
        self, measured: Measured, figures: list[Figures], values: list[float], verdicts: list[list[Verdict]]
    ) -> None:
        from aotc.loadtest.plot import draw

        if self.files.plot is not None:
            draw(self.files.plot, self.kind, list(zip(values, figures, strict=True)), measured.model)
        if self.files.result is None:
            return
        runs = [self._result(measured, n, run, verdicts[n]) for n, run in enumerate(figures)]
        path = self.files.named(measured.model, self.settings.loads[0])
        path.write_text(json.dumps(runs if self.options.sweep else runs[0], indent=1) + "\n")

    def _result(self, measured: Measured, n: int, figures: Figures, verdicts: list[Verdict]) -> dict[str, Any]:
        from aotc.loadtest.report import as_json, details

        options, load = self.options, self.settings.loads[n]
        chat = options.endpoint.endswith("chat/completions")
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"), "endpoint_type": "openai-chat" if chat else "openai",
            "model_id": measured.model, "num_prompts": options.num_prompts,
            "request_rate": "inf" if math.isinf(load.rate) else load.rate,
            "burstiness": "inf" if math.isinf(load.burstiness) else load.burstiness,
            "max_concurrency": load.concurrency, **as_json(figures, self.statistics, options.price_per_hour),
            **({"slo": {v.goal: v.passed for v in verdicts}} if verdicts else {}),
            **(details(measured.runs[n][0]) if options.save_detailed else {}),
        }  # fmt: skip


def _extra_body(text: str | None) -> dict[str, Any]:
    """Raises RequestError."""
    from aotc.errors import RequestError

    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise RequestError(f'--extra-body {text}: write an object of JSON, as {{"top_k": 5}}')
    return fields


def _percentiles(text: str) -> tuple[str, ...]:
    """`90,99.9` as p90 and p99.9. Raises RequestError."""
    from aotc.errors import RequestError

    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= n <= 100 for n in numbers):
        raise RequestError(f"--metric-percentiles {text}: write numbers from 0 to 100, as 50,90,99.9")
    return tuple(f"p{n:g}" for n in numbers)


class _Progress:
    """A line on standard error that counts requests: rewritten in place, on a terminal alone."""

    def __init__(self, requests: int, runs: int, quiet: bool) -> None:
        self._requests, self._runs, self._shown = requests, runs, not quiet and sys.stderr.isatty()
        self._run, self._done, self._failed, self._last = -1, 0, 0, 0.0
        self._begin = time.monotonic()

    def __call__(self, run: int, outcome: Outcome) -> None:
        now = time.monotonic()
        if run != self._run:
            self._run, self._done, self._failed, self._begin = run, 0, 0, now
        self._done += 1
        self._failed += outcome.error is not None
        if self._shown and (now - self._last > 0.1 or self._done == self._requests):
            self._last = now
            line = f"{now - self._begin:6.1f} s  run {run + 1}/{self._runs}  requests {self._done}/{self._requests}"
            failed = f"  failed {self._failed}" if self._failed else ""
            print(f"\r{line}{failed}\033[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown and self._done:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
