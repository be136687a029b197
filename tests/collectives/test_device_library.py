"""The device library without a GPU: its binding, the ladder of rungs, what it refuses."""

from __future__ import annotations

import re
import subprocess
import uuid
from pathlib import Path

import pytest
import torch

from megamuon.collectives.device_library import (
    PATH,
    RUNGS,
    SIGNATURES,
    DeviceCapability,
    DeviceLibrary,
    agree_capability,
    available,
    environment_problems,
    select_rung,
)
from megamuon.collectives.host_library import CODE_VERSION, LibraryMissing

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "bindings" / "device_api.h"
EAGER = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")


def header() -> str:
    return re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))


def fake_library(folder: Path, *, compiled: int, loaded: int, code: int = CODE_VERSION) -> Path:
    """A library with every name of the binding, which says it has these versions."""
    values = {
        "mmd_code_version": code,
        "mmd_compiled_nccl": compiled,
        "mmd_loaded_nccl": loaded,
    }
    source = "\n".join(
        f'extern "C" long {name}() {{ return {values.get(name, 0)}; }}' for name in SIGNATURES
    )
    path = folder / f"lib{uuid.uuid4().hex}.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-xc++", "-", "-o", path]
    subprocess.run(command, input=source, text=True, check=True)
    return path


# --- the interface -------------------------------------------------------------------------------


def test_every_function_of_the_header_is_bound_with_its_arguments() -> None:
    prototypes = re.findall(r"^[\w ]+[\s*]+(mmd_\w+)\(([^)]*)\);", header(), re.MULTILINE)
    counts = {
        name: 0 if arguments.strip() in ("", "void") else arguments.count(",") + 1
        for name, arguments in prototypes
    }
    assert counts == {name: len(arguments) for name, (_, arguments) in SIGNATURES.items()}


def test_the_capability_is_the_header_s() -> None:
    body = re.search(r"typedef struct \{([^}]*)\} mmd_capability;", header())
    assert body is not None
    fields = re.findall(r"int (\w+);", body[1])
    assert fields == [name for name, *_ in DeviceCapability._fields_]


def test_a_library_that_is_not_there_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match=r"absent\.so is not there: build it with: MEGAMUON_"):
        DeviceLibrary(tmp_path / "absent.so")


def test_a_library_for_another_nccl_is_refused_and_both_are_named(tmp_path: Path) -> None:
    path = fake_library(tmp_path, compiled=22907, loaded=22809)
    with pytest.raises(LibraryMissing, match=r"against NCCL 2\.29\.7, and NCCL 2\.28\.9 is loaded"):
        DeviceLibrary(path)


def test_a_library_of_another_code_version_is_refused(tmp_path: Path) -> None:
    path = fake_library(tmp_path, compiled=22907, loaded=22907, code=CODE_VERSION + 1)
    with pytest.raises(LibraryMissing, match=f"has code version {CODE_VERSION + 1}"):
        DeviceLibrary(path)


def test_a_library_that_fits_loads(tmp_path: Path) -> None:
    path = fake_library(tmp_path, compiled=23203, loaded=23203)
    assert DeviceLibrary(path).call.mmd_compiled_nccl() == 23203


# --- environment ---------------------------------------------------------------------------------


def test_a_sound_environment_has_no_problems() -> None:
    assert environment_problems(EAGER) == []
    assert environment_problems(EAGER | {"CUDA_DEVICE_MAX_CONNECTIONS": "16"}) == []
    assert environment_problems(EAGER | {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}) == []


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        (EAGER | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1 "),
        (EAGER | {"CUDA_DEVICE_MAX_CONNECTIONS": "many"}, "CUDA_DEVICE_MAX_CONNECTIONS=many "),
        ({"CUDA_MODULE_LOADING": "EAGER"}, "CUDA_DEVICE_MAX_CONNECTIONS=8 "),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "CUDA_MODULE_LOADING=LAZY "),
        (EAGER | {"CUDA_MODULE_LOADING": "LAZY"}, "CUDA_MODULE_LOADING=LAZY "),
        (EAGER | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_ALLOC_CONF asks"),
        (
            EAGER | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"},
            "PYTORCH_CUDA_ALLOC_CONF asks",
        ),
    ],
)
def test_each_problem_is_named_with_its_value(environment: dict[str, str], names: str) -> None:
    (problem,) = environment_problems(environment)
    assert problem.startswith(names)
    assert ": " in problem  # what to change


# --- rungs ---------------------------------------------------------------------------------------


def test_ranks_agree_on_the_least() -> None:
    for i, low in enumerate(RUNGS):
        for high in RUNGS[i:]:
            assert agree_capability([high, low, high]) == low
            assert agree_capability([low, high]) == low


def test_an_unknown_rung_names_its_rank() -> None:
    with pytest.raises(ValueError, match="rank 1: rung 'fast': choose one of grouped"):
        agree_capability(["lsa", "fast"])
    with pytest.raises(ValueError, match="at least one rank"):
        agree_capability([])


@without_gpu
def test_without_a_gpu_the_rung_is_grouped_with_the_reason() -> None:
    rung = select_rung()
    assert (rung.name, rung.reason) == ("grouped", "there is no GPU that this torch can use")
    assert available() == rung.reason


def test_with_a_gpu_the_rung_follows_library_and_communicator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    path = fake_library(tmp_path, compiled=22907, loaded=22907)
    assert select_rung(path=path).name == "lsa"
    assert select_rung(DeviceCapability(row=1, multimem=0), path=path).name == "lsa"
    best = select_rung(DeviceCapability(row=1, multimem=1), path=path)
    assert (best.name, best.reason) == ("multimem", "")

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    lower = select_rung(path=path)
    assert lower.name in ("symmetric", "grouped")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in lower.reason


def test_an_old_torch_has_no_symmetric_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.delattr(_symmetric_memory, "reduce_scatter_offset", raising=False)
    absent = PATH.with_name("absent.so")
    rung = select_rung(path=absent)
    assert rung.name == "grouped"
    assert "absent.so is not there" in rung.reason
    assert "no symmetric reduce-scatter" in rung.reason
