"""A decode step is one C call: nothing is allocated in it, and no Python runs for a kernel."""

import os
import subprocess
import sys

import pytest

COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static long calls;
static int on;
void count_allocations(int enable) { on = enable; }
long allocations(void) { return calls; }
static void* (*real_malloc)(size_t);
static void* (*real_realloc)(void*, size_t);
extern void* __libc_calloc(size_t, size_t);
void* malloc(size_t n) {
  if (!real_malloc) real_malloc = dlsym(RTLD_NEXT, "malloc");
  if (on) __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  return real_malloc(n);
}
void* calloc(size_t n, size_t size) {
  if (on) __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  return __libc_calloc(n, size);
}
void* realloc(void* p, size_t n) {
  if (!real_realloc) real_realloc = dlsym(RTLD_NEXT, "realloc");
  if (on) __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  return real_realloc(p, n);
}
"""

SCRIPT = """
import ctypes, sys
from aotc.artifact.reader import open_artifact
from aotc.runtime.executor import CpuExecutor
from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Row, Sequence

counter = ctypes.CDLL(sys.argv[2])
counter.allocations.restype = ctypes.c_long
executor = CpuExecutor(open_artifact(sys.argv[1]), 1)
sequence = Sequence(Request("x", (5, 6, 7), SamplingParams(temperature=0.9, top_p=0.8)), 0, [5, 6, 7])
executor.start(sequence)
executor.step([Row(sequence, 0, 3, True)])
sequence.tokens.append(9)
executor.step([Row(sequence, 3, 1, True)])
program, dims = executor.program("decode", 1), {"rows": 1, "slots": 1}
def steps():
    before = counter.allocations()
    for _ in range(50):
        program.run(dims)
    return counter.allocations() - before
steps()  # Python's own small objects reach their final number
counter.count_allocations(1)
bytes(100_000)  # the counter counts
seen = counter.allocations()
in_steps = steps()
counter.count_allocations(0)

events = 0
def count(*_):
    global events
    events += 1
sys.setprofile(count)
program.run(dims)
sys.setprofile(None)
print(seen, in_steps, events, len(list(program.plan.calls())))
"""


@pytest.mark.slow
def test_decode_allocates_nothing_and_runs_no_python_per_kernel(artifacts, tmp_path):
    source, library = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(COUNTER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT, str(artifacts("bf16")), str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, in_steps, events, calls = map(int, done.stdout.split())
    assert seen > 0, "the counter did not see Python's own allocation"
    assert in_steps == 0
    assert events < 20 < calls
