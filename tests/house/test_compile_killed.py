"""A compile that is killed, that meets others, or that finds no compiler or no space leaves no half artifact."""

import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import aotc
from aotc.artifact.reader import open_artifact
from aotc.codegen.cpu import build
from aotc.errors import CompilerError

OLD = Path(__file__).resolve().parents[1] / "end_to_end" / "artifact_format_1"
"""An artifact of another model, which stands where the compile is to put its own."""

# The command, stopped at one point until a signal comes: "STAGE DONE", as progress is reported, or where the writer
# has one of its moments.
DRIVER = """
import sys, time
point, *arguments = sys.argv[1:]
from aotc.artifact import writer
from aotc.cli import compile_command, main

def stop():
    print("reached", flush=True)
    time.sleep(60)

class Finalizer:
    def __del__(self):
        stop()

def stop_at_stage(stage, done, total):
    if point == f"{stage.split()[0]} {done}":
        stop()
    if point == "a finalizer" and stage == "weights" and done == 0:
        Finalizer()

def stop_around(name, first):
    function = getattr(writer, name)
    def stopped(*arguments):
        if first:
            stop()
        result = function(*arguments)
        stop()
        return result
    setattr(writer, name, stopped)

compile_command.silent = stop_at_stage
moments = {"no folder yet": ("_remove_stale", False), "all written": ("_put_in_place", True),
           "before the exchange": ("_exchange", True), "after the exchange": ("_exchange", False)}
if point in moments:
    stop_around(*moments[point])
sys.exit(main(arguments))
"""
POINTS = ("read 0", "programs 1", "weights 0", "weights 1", "kernels 1", "all written", "before the exchange")


def compile_options(source: Path, output: Path) -> list[object]:
    return ["compile", source, "--arch", "x86-64-v3", "--quiet", "-o", output]


def stopped_at(process, point, source, output):
    """A compile that has reached a point."""
    running = process.start(point, *compile_options(source, output), program=("-c", DRIVER))
    assert running.stdout.readline() == "reached\n", running.communicate()
    return running


def hidden(parent: Path) -> list[str]:
    return sorted(p.name for p in parent.iterdir() if p.name.startswith("."))


def assert_whole(path: Path) -> str:
    """Runs an artifact and returns its model's name."""
    model, name = aotc.load(path), open_artifact(path).manifest.model.name
    if name == "tiny":
        x = np.linspace(-1, 1, 2 * 6, dtype=np.float32).reshape(2, 6)
        np.testing.assert_allclose(model(x=x)["output"], np.load(OLD.with_suffix(".npy")), rtol=1e-5, atol=1e-6)
    else:
        scale = {"one": 1, "two": 2}[name]
        np.testing.assert_array_equal(model(x=np.ones((2, 64), np.float32))["y"], np.full((2, 64), 64 * scale))
    return name


@pytest.fixture
def old(tmp_path) -> Path:
    shutil.copytree(OLD, tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize("point", POINTS)
def test_sigkill_leaves_a_folder_that_the_next_compile_removes(process, cli, onnx_files, old, point):
    running = stopped_at(process, point, onnx_files[0], old)
    running.kill()
    assert process.end(running).code == -signal.SIGKILL
    left = [n for n in hidden(old.parent) if n != ".a.lock"]
    assert len(left) == 1 and re.fullmatch(rf"\.a\.tmp-{running.pid}-[0-9a-f]{{8}}", left[0])
    assert assert_whole(old) == "tiny"
    assert cli(*compile_options(onnx_files[1], old)).code == 0
    assert os.listdir(old.parent) == ["a"] and assert_whole(old) == "two"


def test_sigkill_after_the_exchange_leaves_the_new_artifact(process, cli, onnx_files, old):
    running = stopped_at(process, "after the exchange", onnx_files[0], old)
    running.kill()
    process.end(running)
    assert assert_whole(old) == "one" and len(hidden(old.parent)) == 2  # the old one, and the lock
    assert cli(*compile_options(onnx_files[1], old)).code == 0
    assert os.listdir(old.parent) == ["a"] and assert_whole(old) == "two"


@pytest.mark.parametrize(
    ("number", "point"),
    [
        (signal.SIGTERM, "no folder yet"),
        (signal.SIGTERM, "read 0"),
        (signal.SIGINT, "weights 1"),
        (signal.SIGTERM, "kernels 1"),
        (signal.SIGHUP, "all written"),
        (signal.SIGTERM, "before the exchange"),
        (signal.SIGTERM, "a finalizer"),  # which swallows the first exception
    ],
)
def test_a_signal_to_end_leaves_nothing(process, onnx_files, tmp_path, number, point):
    """The first of several counts; later ones do not keep it from cleaning up."""
    output = tmp_path / "made" / "a"
    if point == "before the exchange":
        shutil.copytree(OLD, output)
    running = stopped_at(process, point, onnx_files[0], output)
    for _ in range(3):
        running.send_signal(number)
    assert process.end(running).code == 130
    if point == "before the exchange":
        assert os.listdir(output.parent) == ["a"] and assert_whole(output) == "tiny"
    else:
        assert os.listdir(tmp_path) == []


def test_sigterm_as_soon_as_the_folder_is_there(process, onnx_files, tmp_path):
    running = process.start(*compile_options(onnx_files[0], tmp_path / "a"))
    while running.poll() is None and not hidden(tmp_path):
        time.sleep(0.001)
    running.terminate()
    answer = process.end(running)
    assert answer.code == 130 and answer.err == "" and os.listdir(tmp_path) == []


def slow_compiler(folder: Path, seconds: float, code: int) -> Path:
    """A compiler that notes that it was started, takes its time and fails."""
    script = folder / "c++"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo {folder}\necho >> {folder}/started\nsleep {seconds}\nexit {code}\n'
    )
    script.chmod(0o755)
    return script


def starts(folder: Path) -> int:
    return (folder / "started").stat().st_size if (folder / "started").exists() else 0


def test_sigterm_while_kernels_are_built_leaves_nothing_anywhere(process, onnx_files, tmp_path):
    for name in ("bin", "tmp", "out"):
        (tmp_path / name).mkdir()
    script = slow_compiler(tmp_path / "bin", 0.5, 1)
    options = compile_options(onnx_files[0], tmp_path / "out" / "a")
    running = process.start(*options, AOTC_CXX=str(script), TMPDIR=str(tmp_path / "tmp"))
    while running.poll() is None and not starts(tmp_path / "bin"):
        time.sleep(0.005)
    running.terminate()
    assert process.end(running).code == 130
    assert os.listdir(tmp_path / "out") == [] and os.listdir(tmp_path / "tmp") == []


def test_a_kernel_that_fails_keeps_the_others_from_being_started(tmp_path, monkeypatch):
    script = slow_compiler(tmp_path, 0, 1)
    monkeypatch.setattr(build, "compiler", lambda: str(script))
    monkeypatch.setattr(build, "_version", lambda: str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(CompilerError, match="failed on k000"):
        build.build_library({f"k{n:03}": "" for n in range(200)}, "x86-64-v3")
    assert 1 <= starts(tmp_path) < 100


def test_eight_compiles_into_one_folder_leave_one_whole_artifact(process, onnx_files, tmp_path):
    running = [process.start(*compile_options(onnx_files[n % 2], tmp_path / "a")) for n in range(8)]
    assert [(a.code, a.err) for a in map(process.end, running)] == [(0, "")] * 8
    assert os.listdir(tmp_path) == ["a"]
    assert assert_whole(tmp_path / "a") in ("one", "two")
    files = {str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert files == {*open_artifact(tmp_path / "a").manifest.files, "manifest.json", "weights.bin"}


# No compiler, no space, no permission


def test_without_a_compiler_the_package_is_named(process, onnx_files, tmp_path):
    process(*compile_options(onnx_files[0], tmp_path / "a"), PATH="").refuses("no C++ compiler", "apt-get install g++")
    named = process(*compile_options(onnx_files[0], tmp_path / "a"), AOTC_CXX="icpx")
    named.refuses("icpx (from AOTC_CXX) was not found", "apt-get install g++")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", [1, 8 << 10])  # at the first file, and at the weights
def test_files_that_may_not_grow(process, onnx_files, old, limit):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    answer = process(*compile_options(onnx_files[0], old), preexec_fn=limited)
    answer.refuses(f"cannot write {old}: File too large: free space or name another folder")
    assert os.listdir(old.parent) == ["a"] and assert_whole(old) == "tiny"


def test_a_parent_that_takes_no_folder(process, onnx_files):
    """/proc takes none from root either."""
    answer = process(*compile_options(onnx_files[0], Path("/proc/sys/a")))
    answer.refuses("cannot write /proc/sys/a: ", ": free space or name another folder")


MOUNTED = """
mount -t tmpfs -o "$0" none "$1" || exit 99
folder=$1; shift
"$@"; code=$?
ls -A "$folder"
exit $code
"""


@pytest.fixture
def in_mount(process, tmp_path):
    """in_mount(options, *arguments, **env): the command while a file system lies over the empty folder tmp_path/mount;
    prints what it leaves there. Mounts need root."""
    folder = tmp_path / "mount"
    folder.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("this machine has no unshare")

    def call(options, *arguments, **env):
        command = ["unshare", "--mount", "sh", "-c", MOUNTED, options, folder, sys.executable, "-m", "aotc", *arguments]
        launch = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        answer = process(*command, program=("-c", launch), **env)
        if answer.code == 99 or "unshare" in answer.err:
            pytest.skip("this machine lets nobody mount")
        return answer

    return call


@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        ("size=12k", "No space left on device"),  # at the weights
        ("size=24k", "No space left on device"),  # at the kernels
        ("ro", "Read-only file system"),
    ],
)
def test_full_and_read_only_disks(in_mount, onnx_files, tmp_path, mount, reason):
    output = tmp_path / "mount" / "made" / "a"
    in_mount(mount, *compile_options(onnx_files[0], output)).refuses(f"cannot write {output}: {reason}: free space")


def test_a_full_disk_for_temporary_files(in_mount, onnx_files, tmp_path):
    options = compile_options(onnx_files[0], tmp_path / "a")
    in_mount("size=4k", *options, TMPDIR=str(tmp_path / "mount")).refuses("No space left on device")
    assert os.listdir(tmp_path) == ["mount"]
