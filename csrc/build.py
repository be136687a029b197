"""Builds the native libraries: the host library always, the device library where CUDA and NCCL are.

Owns compilers, flags and what a library is made of; ``setup.py``, ``tools/setup_environment.sh``,
the Makefile and the tests use this file by its path.  Invariants: it imports the standard library
alone (an isolated build has no torch); a library is replaced as a whole, so a process that has the
old one loaded keeps it; a library older than any of its sources is built again. Tested by
``tests/collectives/test_build.py``.

    python csrc/build.py COMMAND

    all             what an install builds, see MEGAMUON_BUILD
    host            megamuon/_native/libmegamuon_host.so: g++
    device          megamuon/_native/libmegamuon_device.so: nvcc, NCCL
    loopback        megamuon/_native/libmegamuon_loopback.so: nvcc; for tests on one GPU
    device-compile  compile every .cu file and link nothing, which needs no GPU
    nvcc            print the CUDA compiler's path; exit status 1 where there is none

    MEGAMUON_BUILD  cpu: the host library alone; cuda: the device library too, or an error; unset:
                    the device library where nvcc and the headers of the NCCL that torch loads are
                    found, else one line says why it was skipped
    MEGAMUON_NCCL   a folder with include/nccl.h and lib/libnccl.so.2, in place of the NCCL of the
                    installed packages
    CXX, NVCC       the compilers, in place of g++, and of nvcc on the PATH, in CUDA_HOME or in
                    /usr/local/cuda
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = Path("megamuon") / "_native"

HOST_LIBRARY = "libmegamuon_host.so"
HOST_SOURCES = ("csrc/bindings/host_api.cpp", "csrc/pool/segment.cpp", "csrc/data/index.cpp")
HOST_SUFFIXES = {".h", ".cpp"}
# Without contraction: a fused multiply-add rounds once, and a blend would be another on some CPUs.
HOST_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
HOST_FLAGS += ("-Wall", "-Wextra")

DEVICE_LIBRARY = "libmegamuon_device.so"
DEVICE_SOURCES = ("csrc/bindings/device_api.cu",)
DEVICE_SUFFIXES = {".h", ".cuh", ".cu"}
LOOPBACK_LIBRARY = "libmegamuon_loopback.so"
LOOPBACK_SOURCES = ("csrc/bindings/loopback_api.cu",)
DEVICE_FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC")

# What the device code must compile against: the NCCL of torch 2.11, that of torch 2.13, and one
# with the full set of GIN verbs. Their device interfaces differ: one says nothing of another.
NCCL_VERSIONS = ("2.28.9", "2.29.7", "2.32.3")
NCCL_PACKAGE = "nvidia-nccl-cu13"

MODES = ("", "cpu", "cuda")


class BuildError(RuntimeError):
    """A library cannot be built; the text says what is missing or what the compiler said."""


# --- what is there -------------------------------------------------------------------------------


def find_cxx() -> str:
    """The C++ compiler; BuildError says which package brings one."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name.split()[0])
    if found is None:
        raise BuildError(
            f"there is no C++ compiler '{name}': install one (on Debian or Ubuntu: "
            "apt-get install -y g++), or name another with CXX="
        )
    return name


def find_nvcc() -> str | None:
    """The CUDA compiler's path, None where there is none."""
    if named := os.environ.get("NVCC"):
        return shutil.which(named)
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    inside = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return next(filter(None, map(shutil.which, ["nvcc", *inside])), None)


def find_nccl() -> Path | None:
    """The folder (include/, lib/) of the NCCL that torch loads, None where there is none."""
    if named := os.environ.get("MEGAMUON_NCCL"):
        folders = [Path(named)]
    else:
        # An isolated build hides the environment's packages from sys.path, not from sysconfig.
        places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        places += site.getsitepackages() + [site.getusersitepackages()]
        folders = [Path(place) / "nvidia" / "nccl" for place in places if place]
    return next((found for found in folders if (found / "include" / "nccl.h").is_file()), None)


def _missing_for_device(root: Path) -> str | None:
    """Why the device library cannot be built, None if it can."""
    absent = [name for name in DEVICE_SOURCES if not (root / name).is_file()]
    if absent:
        return f"{absent[0]} is not there"
    if find_nvcc() is None:
        return "there is no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda"
    if find_nccl() is None:
        where = os.environ.get("MEGAMUON_NCCL") or "the installed packages (nvidia/nccl)"
        return f"there is no include/nccl.h in {where}"
    return None


# --- libraries -----------------------------------------------------------------------------------


def is_stale(library: Path, sources: Iterable[Path]) -> bool:
    """Whether ``library`` is missing or older than one of ``sources``."""
    if not library.is_file():
        return True
    made = library.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > made for path in sources)


def sources_of(suffixes: Set[str], root: Path = ROOT) -> Iterator[Path]:
    """What a library depends on: csrc's files with these suffixes, but for tests, and this file."""
    csrc = root / "csrc"
    yield csrc / "build.py"
    for path in csrc.rglob("*"):
        if path.suffix in suffixes and "tests" not in path.relative_to(csrc).parts:
            yield path


def build_host(folder: Path, root: Path = ROOT, *, force: bool = False) -> bool:
    """Bring ``folder``/libmegamuon_host.so up to date; whether that took a build."""
    library = folder / HOST_LIBRARY
    if not force and not is_stale(library, sources_of(HOST_SUFFIXES, root)):
        return False
    paths = [str(root / source) for source in HOST_SOURCES]
    _make(library, [*find_cxx().split(), *HOST_FLAGS, f"-I{root / 'csrc'}", *paths, "-lrt"])
    return True


def build_device(folder: Path, root: Path = ROOT, *, force: bool = False) -> bool:
    """Bring ``folder``/libmegamuon_device.so up to date; whether that took a build."""
    if reason := _missing_for_device(root):
        raise BuildError(f"the device library cannot be built: {reason}")
    nccl, library = find_nccl(), folder / DEVICE_LIBRARY
    stale = force or is_stale(library, sources_of(DEVICE_SUFFIXES, root))
    # Kernels belong to one NCCL. Packages may keep old dates, so what counts is when it came here.
    header = (nccl / "include" / "nccl.h").stat().st_ctime_ns
    if not stale and header < library.stat().st_mtime_ns:
        return False
    paths = [str(root / source) for source in DEVICE_SOURCES]
    # By its full name: the packages bring no libnccl.so. At run time torch has loaded it before.
    link = ("-cudart=static", f"-L{nccl}/lib", "-l:libnccl.so.2")
    _make(library, [*_nvcc(root), "-shared", f"-I{nccl}/include", *paths, *link])
    return True


def build_loopback(folder: Path, root: Path = ROOT, *, force: bool = False) -> bool:
    """Bring ``folder``/libmegamuon_loopback.so up to date; whether that took a build."""
    library = folder / LOOPBACK_LIBRARY
    if not force and not is_stale(library, sources_of(DEVICE_SUFFIXES, root)):
        return False
    paths = [str(root / source) for source in LOOPBACK_SOURCES]
    _make(library, [*_nvcc(root), "-shared", *paths, "-cudart=static"])
    return True


def build_all(folder: Path, root: Path = ROOT, *, quiet: bool = False) -> None:
    """What an install builds, as MEGAMUON_BUILD says; ``quiet``: no word of what is skipped."""
    mode = os.environ.get("MEGAMUON_BUILD", "")
    if mode not in MODES:
        raise BuildError(f"MEGAMUON_BUILD={mode}: choose cpu or cuda, or leave it unset")
    build_host(folder, root)
    if mode == "cpu":
        (folder / DEVICE_LIBRARY).unlink(missing_ok=True)  # of an earlier build: not asked for
    reason = "MEGAMUON_BUILD=cpu" if mode == "cpu" else _missing_for_device(root)
    if mode == "cuda" or reason is None:
        try:
            build_device(folder, root)
        except BuildError as error:
            hint = "" if mode else "\nMEGAMUON_BUILD=cpu builds the host library alone"
            raise BuildError(f"{error}{hint}") from None
    elif not quiet:
        say(f"device library skipped: {reason}")


def _nvcc(root: Path) -> list[str]:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "there is no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda: install a CUDA "
            "toolkit, or name its compiler with NVCC="
        )
    return [nvcc, *DEVICE_FLAGS, f"-I{root / 'csrc'}"]


def _make(library: Path, command: Sequence[str]) -> None:
    """Run ``command``, which writes a library to ``-o``, and put the result in its place."""
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_name(f".{library.name}.{os.getpid()}")
    started, clock = time.monotonic(), time.time_ns()
    try:
        _compile([*command, "-o", str(fresh)], library.name)
        # Of the time when the sources were read: what is saved during a build counts as newer.
        os.utime(fresh, ns=(clock, clock))
        os.replace(fresh, library)
    finally:
        fresh.unlink(missing_ok=True)
    say(f"{library.name} built in {time.monotonic() - started:.1f} s")


def _compile(command: Sequence[str], what: str) -> None:
    """Run a compiler; its warnings are printed, its failure is a BuildError with all it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise BuildError(
            f"{what} failed with exit status {done.returncode}: {' '.join(command)}\n{said}"
        )
    if said:
        print(said, flush=True)


# --- compile only --------------------------------------------------------------------------------


def compile_device(root: Path = ROOT, versions: Sequence[str] = NCCL_VERSIONS) -> int:
    """Compile every .cu file, those that use NCCL once per version; how many of them failed.

    Prints one line per object. The headers are fetched once and kept in build/nccl.
    """
    nvcc = _nvcc(root)
    jobs: list[tuple[Path, str | None]] = []
    for source in sorted((root / "csrc").rglob("*.cu")):
        jobs += [(source, v) for v in versions] if uses_nccl(source, root) else [(source, None)]
    if not jobs:
        say("there are no .cu files in csrc: nothing to compile")
        return 0
    headers = {version: fetch_nccl(version, root) for _, version in jobs if version}

    def one(job: tuple[Path, str | None]) -> bool:
        source, version = job
        name = source.relative_to(root)
        against = f"NCCL {version}" if version else "no NCCL"
        target = root / "build" / "device" / (version or "plain") / f"{source.stem}.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        include = [f"-I{headers[version]}"] if version else []
        started = time.monotonic()
        try:
            _compile([*nvcc, "-c", *include, str(source), "-o", str(target)], str(name))
        except BuildError as error:
            say(f"{name}: {against}: FAILED\n{error}")
            return False
        say(f"{name}: {against}: compiled in {time.monotonic() - started:.1f} s")
        return True

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, jobs)).count(False)


def uses_nccl(source: Path, root: Path = ROOT) -> bool:
    """Whether ``source`` includes NCCL's headers, by itself or through headers of csrc."""
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in re.findall(
            r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE
        ):
            if name.startswith("nccl"):
                return True
            near = (path.parent / name, root / "csrc" / name)
            waiting += [found.resolve() for found in near if found.is_file()]
    return False


def fetch_nccl(version: str, root: Path = ROOT) -> Path:
    """The include folder of an NCCL version, out of its package; downloaded if it is not there."""
    folder = root / "build" / "nccl" / version
    include = folder / "include"
    if include.is_dir():
        return include
    requirement = f"{NCCL_PACKAGE}=={version}"
    say(f"fetching the headers of {requirement}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
        ]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", scratch]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        packages = list(Path(scratch).glob("*.whl"))
        if done.returncode or not packages:
            raise BuildError(f"pip could not download {requirement}:\n{done.stderr.strip()}")
        with zipfile.ZipFile(packages[0]) as package:
            prefix = "nvidia/nccl/include/"
            wanted = [name for name in package.namelist() if name.startswith(prefix)]
            package.extractall(scratch, wanted)
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # somebody else was faster
            (Path(scratch) / prefix).rename(include)
    return include


# --- command line --------------------------------------------------------------------------------


def say(text: str) -> None:
    """One line of a build."""
    print(f"build: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(description="Build the native libraries of MegaMuon.")
    names = ("all", "host", "device", "loopback", "device-compile", "nvcc")
    parser.add_argument("command", choices=names)
    parser.add_argument("--force", action="store_true", help="build even what is up to date")
    parser.add_argument("--quiet", action="store_true", help="no word of what is skipped")
    options = parser.parse_args(arguments)
    folder = ROOT / NATIVE
    builders = {"host": build_host, "device": build_device, "loopback": build_loopback}
    try:
        if options.command == "nvcc":
            print(find_nvcc() or "there is no nvcc")
            return 0 if find_nvcc() else 1
        if options.command == "device-compile":
            return 1 if compile_device() else 0
        if options.command == "all":
            build_all(folder, quiet=options.quiet)
        else:
            builders[options.command](folder, force=options.force)
    except BuildError as error:
        print(f"build: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
