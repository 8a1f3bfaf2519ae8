"""What is installed is what lies in the tree, by link, wheel and sdist; and `import aotc` is free."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

LINKS = ("codegen", "models", "passes", "runtime")
SOURCES = ("aotc", *LINKS, "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Standard output of a command that must succeed; `env` is all that it gets."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env or None, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed_files(repo_root: Path) -> set[str]:
    """Every file below aotc/, links followed, named as it is to be installed."""
    found = set()
    for top in ("aotc", *LINKS):
        for path in (repo_root / top).rglob("*"):  # does not walk through the links
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(("" if top == "aotc" else "aotc/") + path.relative_to(repo_root).as_posix())
    return found


def declared(repo_root: Path) -> dict:
    return tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_packages_list_equals_tree(repo_root: Path) -> None:
    with_code = {name.rpartition("/")[0] for name in installed_files(repo_root) if name.endswith(".py")}
    assert sorted(declared(repo_root)["packages"]) == sorted(folder.replace("/", ".") for folder in with_code)
    missing = [folder for folder in with_code if f"{folder}/__init__.py" not in installed_files(repo_root)]
    assert not missing, "folders with Python files and no __init__.py"


@pytest.mark.parametrize("name", LINKS)
def test_link_and_package_dir_agree(repo_root: Path, name: str) -> None:
    link = repo_root / "aotc" / name
    assert link.is_symlink() and link.readlink() == Path("..", name)
    assert declared(repo_root)["package-dir"][f"aotc.{name}"] == name


@pytest.fixture(scope="module")
def source(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: a build writes into its source, and picks up what an earlier one left there."""
    copy = tmp_path_factory.mktemp("packaging") / "source"
    copy.mkdir()
    for name in SOURCES:
        path = repo_root / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, copy)
    return copy


def build_wheel(project: Path, folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(*pip, "wheel", *options, project, cwd=project.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_tree_and_nothing_else(source: Path, repo_root: Path, tmp_path: Path) -> None:
    wheel = build_wheel(source, tmp_path)
    assert contents(wheel) == installed_files(repo_root)

    import aotc

    assert wheel.name.startswith(f"aotc-{aotc.__version__}-py3")
    names = ", ".join(f"aotc.{name}" for name in ("artifact", "frontend", "ir", *LINKS))
    script = f"import {names}; print(aotc.passes.__file__)"
    assert run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(wheel)).startswith(str(wheel))


def test_sdist_builds_the_same_wheel(source: Path, repo_root: Path, tmp_path: Path) -> None:
    script = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", script, cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert contents(build_wheel(sdist, tmp_path)) == installed_files(repo_root)


def test_import_aotc_loads_nothing_but_the_standard_library(repo_root: Path) -> None:
    script = "import sys; old = {*sys.modules}; import aotc; print(*{*sys.modules} - old)"
    loaded = run(sys.executable, "-c", script, cwd=repo_root).split()
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"aotc"}


def test_lazy_names() -> None:
    import aotc
    from aotc import errors

    assert aotc.ArtifactError is errors.ArtifactError
    public = {name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__}
    assert public == {name for name in aotc.__all__ if isinstance(getattr(aotc, name), type)}
    with pytest.raises(AttributeError, match="nonsense"):
        _ = aotc.nonsense
