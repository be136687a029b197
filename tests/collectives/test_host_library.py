"""The binding of the host library: it is what the header describes, or it says what to do."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamuon.collectives import CollectiveError, host_library
from megamuon.collectives.host_library import (
    CODE_VERSION,
    DTYPES,
    OPERATOR_KINDS,
    SIGNATURES,
    HostLibrary,
    LibraryMissing,
    available,
    library,
    native,
)
from megamuon.collectives.operator_settings import OperatorConfig

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "bindings" / "host_api.h"
SHM = Path("/dev/shm")


def header() -> str:
    return re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))


def compiled(folder: Path, source: str) -> Path:
    """A library made from C++ ``source``."""
    path = folder / f"lib{uuid.uuid4().hex}.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", "-xc++", "-"]
    subprocess.run([*command, "-o", path], input=source, text=True, check=True)
    return path


@pytest.fixture
def name() -> Iterator[str]:
    name = f"/megamuon-test-{uuid.uuid4().hex}"
    yield name
    (SHM / name[1:]).unlink(missing_ok=True)


# --- the interface -------------------------------------------------------------------------------


def test_every_function_of_the_header_is_bound_with_its_arguments() -> None:
    text = header()
    prototypes = re.findall(r"^[\w ]+[\s*]+(mm_\w+)\(([^)]*)\);", text, re.MULTILINE)
    counts = {
        name: 0 if arguments.strip() in ("", "void") else arguments.count(",") + 1
        for name, arguments in prototypes
    }
    assert len(counts) == len(set(re.findall(r"\b(mm_\w+)\(", text)))
    assert {name: len(arguments) for name, (_, arguments) in SIGNATURES.items()} == counts


def test_the_constants_are_those_of_the_header() -> None:
    text = header()
    assert f"#define MM_CODE_VERSION {CODE_VERSION}\n" in text
    values = {name: int(value) for name, value in re.findall(r"MM_(\w+) = (\d+)", text)}
    short = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
    ours = {short[str(dtype).removeprefix("torch.")]: code for dtype, code in DTYPES.items()}
    assert values == ours | {kind.upper(): code for code, kind in enumerate(OPERATOR_KINDS)}


def test_the_configuration_arrives_in_c_as_it_was_given(tmp_path: Path) -> None:
    source = """
        #include "bindings/host_api.h"
        extern "C" uint64_t field(const mm_operator_config* c, int i) {
          const uint64_t all[] = {(uint64_t)c->kind, (uint64_t)c->nodes, (uint64_t)c->columns,
            (uint64_t)c->ranks[0], (uint64_t)c->ranks[5], c->control_offset, (uint64_t)c->slots,
            c->chunk_bytes, (uint64_t)c->groups, c->star_bytes, (uint64_t)c->parameters,
            c->tiles, c->tile_bytes};
          return all[i];
        }"""
    (body,) = re.findall(r"struct \{([^}]*)\} mm_operator_config;", header())
    named = re.findall(r"(\w+)(?=[,;])", body)
    assert named == [name for name, _ in host_library._Config._fields_]
    field = ctypes.CDLL(str(compiled(tmp_path, source))).field
    field.argtypes = (ctypes.c_void_p, ctypes.c_int)
    field.restype = ctypes.c_uint64
    config = OperatorConfig(
        kind="publish",
        nodes=2,
        columns=3,
        ranks=(9, 8, 7, 6, 5, 4),
        control_offset=2**40,
        slots=5,
        chunk_bytes=2**33,
        groups=6,
        star_bytes=2**36,
        parameters=7,
        tiles=2**34,
        tile_bytes=2**35,
    )
    made = native(config)
    values = [field(ctypes.addressof(made), i) for i in range(13)]
    assert values == [2, 2, 3, 9, 4, 2**40, 5, 2**33, 6, 2**36, 7, 2**34, 2**35]


def test_a_wrong_configuration_is_refused() -> None:
    given = {"nodes": 1, "columns": 2, "ranks": (0, 1), "control_offset": 0}
    with pytest.raises(ValueError, match="operator kind 'gather': choose all_gather, reduce_"):
        OperatorConfig(kind="gather", **given)
    with pytest.raises(ValueError, match="over 1 x 2 ranks has 3 of them"):
        OperatorConfig(kind="publish", **given | {"ranks": (0, 1, 2)})


# --- loading -------------------------------------------------------------------------------------


def test_the_library_is_loaded_once_and_usable() -> None:
    assert available() is None
    assert library() is library()
    assert library().call.mm_code_version() == CODE_VERSION
    assert library().engine_control_bytes() > 0


def test_a_missing_library_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libmegamuon_host.so"
    expected = f"the host library {path} is not there: build it with: pip install --no-build-iso"
    with pytest.raises(LibraryMissing, match=re.escape(expected)):
        HostLibrary(path)
    monkeypatch.setattr(host_library, "_loaded", None)
    monkeypatch.setattr(host_library.HostLibrary.__init__, "__defaults__", (path,))
    assert available().startswith(expected)
    monkeypatch.undo()
    assert available() is None  # an absence is not remembered


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    path = compiled(tmp_path, 'extern "C" int mm_code_version() { return 99; }')
    expected = rf"{path} has code version 99, and this package needs {CODE_VERSION}: build it with"
    with pytest.raises(LibraryMissing, match=expected):
        HostLibrary(path)


def test_a_library_without_a_function_is_refused(tmp_path: Path) -> None:
    source = f'extern "C" int mm_code_version() {{ return {CODE_VERSION}; }}'
    with pytest.raises(LibraryMissing, match="has no mm_segment_create: build it with"):
        HostLibrary(compiled(tmp_path, source))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libmegamuon_host.so"
    path.write_text("no library\n")
    with pytest.raises(LibraryMissing, match="does not load .*build it with"):
        HostLibrary(path)


# --- segments ------------------------------------------------------------------------------------


def test_a_segment_is_zero_has_its_pages_and_is_seen_by_all_who_map_it(name: str) -> None:
    nbytes = 3 * 4096 + 17
    first = library().create_segment(name, nbytes)
    facts = (SHM / name[1:]).stat()
    assert (facts.st_size, facts.st_mode & 0o777) == (nbytes, 0o600)
    assert facts.st_blocks * 512 >= nbytes  # the pages are there before anybody touches them
    assert ctypes.string_at(first, nbytes) == bytes(nbytes)
    second = library().map_segment(name, nbytes)
    assert second != first
    ctypes.memmove(first + nbytes - 5, b"hello", 5)
    library().unlink_segment(name)
    assert not (SHM / name[1:]).exists()
    library().unmap_segment(first, nbytes)
    assert ctypes.string_at(second + nbytes - 5, 5) == b"hello"
    library().unmap_segment(second, nbytes)
    assert name[1:] not in Path("/proc/self/maps").read_text()
    library().unlink_segment(name)  # no error


def test_a_segment_that_does_not_fit_says_where_how_much_and_how_much_there_is(name: str) -> None:
    room = os.statvfs(SHM)
    asked = 2**50
    with pytest.raises(CollectiveError) as error:
        library().create_segment(name, asked)
    found = re.search(
        r"/dev/shm cannot give (\d+) bytes: (.+); (\d+) of its (\d+)", str(error.value)
    )
    assert found, str(error.value)
    assert int(found[1]) == asked
    assert int(found[4]) == room.f_blocks * room.f_frsize >= int(found[3])
    assert "--shm-size" in str(error.value)
    assert not (SHM / name[1:]).exists()


def test_segments_that_cannot_be_had_say_why(name: str) -> None:
    with pytest.raises(CollectiveError, match=f"'{name}': opening it in /dev/shm failed: No such"):
        library().map_segment(name, 4096)
    address = library().create_segment(name, 4096)
    with pytest.raises(
        CollectiveError, match=f"'{name}': creating it in /dev/shm failed: File exi"
    ):
        library().create_segment(name, 4096)
    with pytest.raises(CollectiveError, match="has 4096 bytes, and 8192 are asked for"):
        library().map_segment(name, 8192)
    with pytest.raises(CollectiveError, match="0 bytes is no size"):
        library().map_segment(name, 0)
    for wrong in ("", "/", "x", "/a/b"):
        with pytest.raises(CollectiveError, match="the name must be '/' and one word"):
            library().create_segment(wrong, 4096)
    library().unmap_segment(address, 4096)
