"""Measure schedules of a model's CUDA kernels on the GPU that is here, and write them as a table.

`aotc compile --schedules TABLE` takes the fastest of each kernel from it. Weights are never read. The table is
written after every kernel: an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from aotc.cli.compile_command import add_model_arguments

    parser.add_argument(
        "--arch", default="native", metavar="A", help="native: the GPU that is here; or its name, as a check"
    )
    parser.add_argument("--programs", metavar="KIND[,KIND]", help="decode, extend (all)")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no kernel after these")
    parser.add_argument("-o", "--output", metavar="FILE", help="the table; what it has is kept (ARCH.json)")
    parser.add_argument("--force", action="store_true", help="measure again what the table has")
    add_model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from aotc.cli.compile_command import Progress, interruptible, open_model, say, silent, unsaid
    from aotc.errors import RequestError
    from aotc.target import parse_targets

    arch = None
    if options.arch != "native":
        targets = parse_targets(options.arch)
        if len(targets) != 1 or targets[0].device != "cuda":
            raise RequestError(f"--arch {options.arch}: schedules are measured for one GPU architecture, say native")
        arch = targets[0].name
    if options.persistent_kernel == "on":
        raise RequestError("--persistent-kernel on does not apply to tune, which measures layers alone: leave it out")
    if not options.budget > 0:
        raise RequestError(f"--budget {options.budget:g}: seconds, more than 0")
    from aotc import meter as meters
    from aotc import tuner
    from aotc.backends import BACKENDS
    from aotc.codegen.cuda.tables import FORMAT, Table, read_table, write_table
    from aotc.compiler import device_programs, optimise

    meter = meters.open_meter(arch)
    path = Path(options.output or f"{meter.arch}.json")
    table = read_table(path) if path.exists() else Table(FORMAT, meter.arch, {})
    if table.arch != meter.arch:
        raise RequestError(f"{path} has schedules of {table.arch}, not {meter.arch}: write another table with -o")
    table = tuner.on_device(table, meter.device)
    shown, note = (silent, unsaid) if options.quiet else (Progress(), say)
    with interruptible(shown) as progress:
        progress("read and trace", 0, 1)
        model, compile_options = open_model(options)
        progress("read and trace", 1, 1)
        _, programs = device_programs(optimise(model, progress), model, BACKENDS["cuda"](), compile_options, progress)
        jobs = tuner.jobs_of(tuner.select(programs, options.programs), meter.arch, compile_options.batch_invariant)
        todo = tuner.left(jobs, table, options.force)
        tuning = tuner.Tuning(meter, lambda t: write_table(t, path), note, progress, options.budget)
        table, unmeasured = tuner.tune(todo, table, tuning)
    have = sum(j.key in table.schedules for j in jobs)
    if not options.quiet:
        print(f"{path}: {have} of the {len(jobs)} schedules of {model.name} on {meter.device}", file=sys.stderr)
    if unmeasured:
        note(f"the budget left out {unmeasured}: run the command again to go on")
    return 0
