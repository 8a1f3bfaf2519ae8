"""Builds the kernels of a graph for this machine and checks each against the interpreter."""

import dataclasses

import numpy as np
import pytest

from aotc.codegen.cpu.library import build
from aotc.compiler import make_program
from aotc.harness import check_calls
from aotc.ir.interpret import bind_dims
from aotc.runtime.devices.cpu import CpuLibrary
from aotc.target import best_cpu_target


@pytest.fixture
def check_cpu(tmp_path):
    """check(graph, inputs, weights=None, level=None) -> differences of every kernel, and the program."""

    def check(graph, inputs, weights=None, level=None, strides=None):
        program = make_program(graph)
        target = level or best_cpu_target().name
        built = build([program], target, strides or {})
        path = tmp_path / f"{graph.name}_{target}.so"
        path.unlink(missing_ok=True)  # a library that is loaded is not written over
        path.write_bytes(built.data)
        library = CpuLibrary(path, built.scratch_bytes)
        dims = bind_dims(graph, {k: np.shape(v) for k, v in inputs.items()})
        found = list(check_calls(program, inputs, weights or (lambda k: None), dims, library, strides or {}))
        return [d for d in found if d is not None], program

    return check


@pytest.fixture
def broken(monkeypatch):
    """broken(module, right, wrong): kernels in CUDA C++ that a module renders have something wrong in their source. At the
    end of the test one must have had it."""
    found = []

    def put(module, right, wrong):
        real = module.source

        def source(*arguments, **hooks):
            made = real(*arguments, **hooks)
            found.append(right in made.text)
            return dataclasses.replace(made, text=made.text.replace(right, wrong))

        monkeypatch.setattr(module, "source", source)

    yield put
    assert any(found)
