"""csrc/build.py: what is built when, from what, and what is said where that cannot be."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("CXX", "NVCC", "CUDA_HOME", "CUDA_PATH", "MEGAMUON_BUILD", "MEGAMUON_NCCL")


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "csrc" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small csrc, whose library has one function that returns what its header says."""
    root = tmp_path / "clone"
    for folder in ("bindings", "data", "pool", "tests"):
        (root / "csrc" / folder).mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / "build.py", root / "csrc")
    write(root, "pool/number.h", "#define NUMBER 1\n")
    write(root, "pool/segment.cpp", "int unused_here();\n")
    write(root, "data/index.cpp", "int unused_there();\n")
    write(root, "tests/driver.cpp", "int main() {}\n")
    write(
        root,
        "bindings/host_api.cpp",
        '#include "pool/number.h"\nextern "C" int number() { return NUMBER; }\n',
    )
    return root


def write(root: Path, name: str, text: str) -> None:
    (root / "csrc" / name).write_text(text, encoding="utf-8")


def fake_nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str = "") -> Path:
    """A CUDA compiler that notes its arguments and writes them where the output should go."""
    nvcc, log = folder / "nvcc", folder / "nvcc.log"
    nvcc.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\n{body}\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made >"$2"; shift; done\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC", str(nvcc))
    return log


def fake_nccl(folder: Path) -> Path:
    (folder / "nccl" / "include").mkdir(parents=True)
    (folder / "nccl" / "include" / "nccl.h").write_text("")
    return folder / "nccl"


# --- the host library ----------------------------------------------------------------------------


def test_the_host_library_is_built_once_and_again_when_a_source_is_newer(tree: Path) -> None:
    folder = tree / "megamuon" / "_native"
    library = folder / build.HOST_LIBRARY
    assert build.build_host(folder, tree) is True
    loaded = ctypes.CDLL(str(library))
    assert build.build_host(folder, tree) is False
    write(tree, "tests/driver.cpp", "int main() { return 1; }\n")
    write(tree, "bindings/device_api.cu", "")
    assert build.build_host(folder, tree) is False  # neither is part of it
    write(tree, "pool/number.h", "#define NUMBER 2\n")
    assert build.build_host(folder, tree) is True
    assert loaded.number() == 1  # the loaded library was replaced and not written to
    script = f"import ctypes; print(ctypes.CDLL({str(library)!r}).number())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "2\n"
    assert [path.name for path in folder.iterdir()] == [build.HOST_LIBRARY]


def test_what_is_saved_during_a_build_counts_as_newer(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it = build._compile

    def slow(command: list[str], what: str) -> None:
        compile_it(command, what)
        write(tree, "pool/number.h", "#define NUMBER 3\n")

    monkeypatch.setattr(build, "_compile", slow)
    assert build.build_host(tree / "out", tree) is True
    monkeypatch.undo()
    assert build.build_host(tree / "out", tree) is True


def test_a_failed_build_says_what_the_compiler_said_and_leaves_the_old_library(tree: Path) -> None:
    build.build_host(tree / "out", tree)
    before = (tree / "out" / build.HOST_LIBRARY).read_bytes()
    write(tree, "pool/number.h", "#define NUMBER this_is_nothing\n")
    with pytest.raises(build.BuildError, match="this_is_nothing"):
        build.build_host(tree / "out", tree)
    assert [path.read_bytes() for path in (tree / "out").iterdir()] == [before]


def test_a_missing_compiler_names_its_package(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tree))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler 'g\+\+'.*apt-get install -y g"):
        build.build_host(tree / "out", tree)


# --- the device library --------------------------------------------------------------------------


def test_the_device_library_is_skipped_with_one_line_that_says_why(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.build_all(tree / "out", tree)
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "build: device library skipped: csrc/bindings/device_api.cu is not there",
    ]
    write(tree, "bindings/device_api.cu", "")
    monkeypatch.setenv("NVCC", "nonesuch")
    build.build_all(tree / "out", tree)
    assert "device library skipped: there is no nvcc" in capsys.readouterr().out
    fake_nvcc(tree, monkeypatch)
    monkeypatch.setenv("MEGAMUON_NCCL", str(tree / "nothing"))
    build.build_all(tree / "out", tree)
    assert f"skipped: there is no include/nccl.h in {tree}/nothing" in capsys.readouterr().out
    build.build_all(tree / "out", tree, quiet=True)
    assert capsys.readouterr().out == ""
    assert [path.name for path in (tree / "out").iterdir()] == [build.HOST_LIBRARY]


def test_the_device_library_is_built_where_nvcc_and_the_headers_are(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, "bindings/device_api.cu", "")
    nccl, log = fake_nccl(tree), fake_nvcc(tree, monkeypatch)
    monkeypatch.setenv("MEGAMUON_NCCL", str(nccl))
    time.sleep(0.05)  # file systems tell times apart by ticks
    build.build_all(tree / "out", tree)
    (command,) = log.read_text().splitlines()
    assert f"-I{nccl}/include" in command and f"-L{nccl}/lib -l:libnccl.so.2" in command
    assert "code=sm_90a" in command and "-std=c++17" in command
    build.build_all(tree / "out", tree)
    assert len(log.read_text().splitlines()) == 1
    time.sleep(0.05)
    os.utime(nccl / "include" / "nccl.h", (0, 0))  # another NCCL, with an old date
    build.build_all(tree / "out", tree)
    assert len(log.read_text().splitlines()) == 2


def test_the_mode_decides(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tree, "bindings/device_api.cu", "")
    monkeypatch.setenv("NVCC", "nonesuch")
    monkeypatch.setenv("MEGAMUON_BUILD", "cuda")
    with pytest.raises(build.BuildError, match="cannot be built: there is no nvcc"):
        build.build_all(tree / "out", tree)
    fake_nvcc(tree, monkeypatch)
    monkeypatch.setenv("MEGAMUON_NCCL", str(fake_nccl(tree)))
    build.build_all(tree / "out", tree)
    assert (tree / "out" / build.DEVICE_LIBRARY).is_file()
    monkeypatch.setenv("MEGAMUON_BUILD", "cpu")
    build.build_all(tree / "out", tree)
    assert [path.name for path in (tree / "out").iterdir()] == [build.HOST_LIBRARY]
    monkeypatch.setenv("MEGAMUON_BUILD", "gpu")
    with pytest.raises(build.BuildError, match="MEGAMUON_BUILD=gpu: choose cpu or cuda"):
        build.build_all(tree / "out", tree)


def test_a_device_build_that_fails_unasked_says_how_to_do_without(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, "bindings/device_api.cu", "")
    fake_nvcc(tree, monkeypatch, body="echo unknown architecture >&2; exit 2")
    monkeypatch.setenv("MEGAMUON_NCCL", str(fake_nccl(tree)))
    with pytest.raises(build.BuildError, match="unknown architecture\nMEGAMUON_BUILD=cpu builds"):
        build.build_all(tree / "out", tree)


# --- compile only --------------------------------------------------------------------------------


def test_sources_that_use_nccl_are_compiled_once_per_version(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tree, "pool/deep.cuh", "#include <nccl_device.h>\n")
    write(tree, "pool/wide.cuh", '#include "deep.cuh"\n')
    write(tree, "bindings/device_api.cu", '#include "pool/wide.cuh"\n')
    write(tree, "bindings/loopback_api.cu", '#include "pool/number.h"\n#include <vector>\n')
    for version in ("1.0", "2.0"):  # as if fetched before
        (tree / "build" / "nccl" / version / "include").mkdir(parents=True)
    log = fake_nvcc(tree, monkeypatch)
    assert build.compile_device(tree, ("1.0", "2.0")) == 0
    said = sorted(line.rsplit(" in ", 1)[0] for line in capsys.readouterr().out.splitlines())
    assert said == [
        "build: csrc/bindings/device_api.cu: NCCL 1.0: compiled",
        "build: csrc/bindings/device_api.cu: NCCL 2.0: compiled",
        "build: csrc/bindings/loopback_api.cu: no NCCL: compiled",
    ]
    commands = log.read_text().splitlines()
    assert all(" -c " in command for command in commands)
    assert [sum(f"nccl/{v}/include" in command for command in commands) for v in (1.0, 2.0)] == [
        1,
        1,
    ]


def test_an_object_that_does_not_compile_is_counted(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tree, "bindings/good.cu", "")
    write(tree, "bindings/bad.cu", "")
    fake_nvcc(tree, monkeypatch, body='case "$*" in *bad.cu*) echo a wrong word >&2; exit 2;; esac')
    assert build.compile_device(tree) == 1
    said = capsys.readouterr().out
    assert "csrc/bindings/bad.cu: no NCCL: FAILED" in said and "a wrong word" in said
    assert "csrc/bindings/good.cu: no NCCL: compiled" in said


def test_without_a_cuda_compiler_nothing_is_said_to_be_compiled(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, "bindings/good.cu", "")
    monkeypatch.setenv("NVCC", "nonesuch")
    with pytest.raises(build.BuildError, match="there is no nvcc"):
        build.compile_device(tree)
    status = subprocess.run(
        [sys.executable, tree / "csrc" / "build.py", "device-compile"],
        capture_output=True,
        text=True,
    )
    assert status.returncode == 1 and "error: there is no nvcc" in status.stderr


# --- installs ------------------------------------------------------------------------------------


def test_it_imports_the_standard_library_alone() -> None:
    found = ast.walk(ast.parse((ROOT / "csrc" / "build.py").read_text(encoding="utf-8")))
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    found = ast.walk(ast.parse((ROOT / "csrc" / "build.py").read_text(encoding="utf-8")))
    names |= {node.module or "" for node in found if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_wheel_has_the_library_and_fits_every_python(tree: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "megamuon").mkdir()
    (tree / "megamuon" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--quiet", "--disable-pip-version-check", "--wheel-dir", "wheels", "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "wheels").iterdir()
    assert wheel.name.startswith("megamuon-1.2.3-py3-none-linux_")
    assert f"megamuon/_native/{build.HOST_LIBRARY}" in zipfile.ZipFile(wheel).namelist()
