"""Writers that fail, are killed or meet: the old artifact or the new one is there, whole, and nothing else."""

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from small_artifact import leftovers, read_all, write

from aotc.artifact import writer
from aotc.artifact.manifest import CHUNK_BYTES
from aotc.artifact.reader import open_artifact
from aotc.artifact.writer import ArtifactWriter
from aotc.errors import ArtifactError


class Killed(Exception):
    pass


def test_an_error_leaves_the_old_artifact_and_nothing_else(artifact):
    before = open_artifact(artifact).manifest.sha256
    with pytest.raises(Killed), ArtifactWriter(artifact) as out:
        out.add_weight("w", "f32", (1 << 20,), None, np.ones(1 << 20, np.float32))
        raise Killed
    assert read_all(artifact).manifest.sha256 == before
    assert leftovers(artifact.parent) == []


def test_an_error_removes_the_parents_it_made(tmp_path):
    with pytest.raises(Killed), ArtifactWriter(tmp_path / "a" / "b" / "c"):
        raise Killed
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a" / "b" / "c")
    read_all(tmp_path / "a" / "b" / "c")


def test_an_artifact_is_replaced_and_its_link_stays(tmp_path):
    write(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", 2)
    assert (tmp_path / "link").is_symlink() and leftovers(tmp_path) == []
    assert read_all(tmp_path / "link").map_weights()[:4].view(np.float32)[0] == 2


def test_what_is_no_artifact_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(ArtifactError, match="exists and is no artifact"):
            write(tmp_path / name)
    write(tmp_path / "empty")
    read_all(tmp_path / "empty")
    with pytest.raises(ArtifactError, match="cannot write"):
        write(tmp_path / "file" / "below")


def spawn(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def write_until_killed(path, reached):
    with ArtifactWriter(path) as out:
        out.add_weight("w", "f32", (1 << 20,), None, np.ones(1 << 20, np.float32))
        out.add_file("plans/main.json", b"{}")
        reached.set()
        time.sleep(60)


def test_a_killed_writer_leaves_the_old_artifact_and_the_next_write_cleans_up(artifact):
    reached = multiprocessing.get_context("fork").Event()
    process = spawn(write_until_killed, artifact, reached)
    assert reached.wait(10)
    write(artifact, 5)  # a writer that lives keeps its folder
    assert len(leftovers(artifact.parent)) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(leftovers(artifact.parent)) == 1
    read_all(artifact)
    write(artifact, 7)
    assert leftovers(artifact.parent) == []
    assert read_all(artifact).map_weights()[:4].view(np.float32)[0] == 7


def test_a_folder_of_the_same_process_id_is_cleaned_up(tmp_path):
    """Compiles in containers all have the same small process id."""
    (tmp_path / f".a.tmp-{os.getpid()}-0123abcd").mkdir()
    (tmp_path / ".b.tmp-1-0123abcd").mkdir()  # of another name
    (tmp_path / ".a.lock").touch()  # of one killed while it renamed
    write(tmp_path / "a")
    assert leftovers(tmp_path) == [".b.tmp-1-0123abcd"]


def test_without_an_exchange_in_one_step_the_old_one_survives_a_kill(artifact, monkeypatch):
    monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
    write(artifact, 3)
    assert read_all(artifact).map_weights()[:4].view(np.float32)[0] == 3 and leftovers(artifact.parent) == []
    artifact.rename(artifact.parent / ".a.tmp-999999999-0123abcd.old")  # killed between the two renames
    with pytest.raises(Killed), ArtifactWriter(artifact):
        raise Killed
    assert read_all(artifact).map_weights()[:4].view(np.float32)[0] == 3 and leftovers(artifact.parent) == []


def write_many(path, seed, start):
    start.wait()
    for _ in range(3):
        write(path, seed)


def test_eight_writers_into_one_folder_leave_one_whole_artifact(tmp_path):
    start = multiprocessing.get_context("fork").Barrier(8)
    processes = [spawn(write_many, tmp_path / "a", seed, start) for seed in range(8)]
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0] * 8
    read_all(tmp_path / "a")
    assert leftovers(tmp_path) == []


def test_a_parent_that_cannot_be_written_gives_one_clear_error(tmp_path, monkeypatch):
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o555)
    if os.geteuid() == 0:  # permissions do not bind root

        def refuse(self, *arguments, **options):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ArtifactError, match=r"cannot write .*parent/a: Permission denied: free space or name another"):
        write(parent / "a")
    assert list(parent.iterdir()) == []


def write_on_a_full_disk(path, limit, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write(path)
        results.put("no error")
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("limit", [1, 1000, 1 << 20, CHUNK_BYTES + 100])
def test_a_full_disk_gives_one_clear_error_and_leaves_nothing(artifact, limit):
    before = open_artifact(artifact).manifest.sha256
    results = multiprocessing.get_context("fork").Queue()
    spawn(write_on_a_full_disk, artifact, limit, results).join(30)
    message = results.get(timeout=5)
    assert message.startswith("ArtifactError: cannot write") and "\n" not in message
    assert read_all(artifact).manifest.sha256 == before and leftovers(artifact.parent) == []


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_disk_that_fails_late_leaves_nothing(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(ArtifactError, match="Input/output error"):
        write(tmp_path / "a")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
