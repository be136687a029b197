"""The set-up script's decisions, with an interpreter that only notes what venv and pip were asked
to do; then the same with a real venv and a real pip, over small wheels that stand for torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
INSTALL_PACKAGE = "install --no-build-isolation --constraint .venv/torch-constraint.txt -e .[test]"

# Answers `-m venv` and `-m pip` by itself and runs everything else in the real interpreter
# without its packages; torch is a folder with metadata, on the path where that environment would
# see it. A wheel that is asked for as torch==V has the version WHEEL (V without it) in its
# metadata; every torch calls itself CALLED (as its metadata does without it).
FAKE_PYTHON = """#!/usr/bin/env bash
set -euo pipefail
top=$(cd "$(dirname "$0")/.." && pwd)
packages="$top/site"
if grep -qs "= true" "$top/pyvenv.cfg"; then packages+=":$SYSTEM_SITE"; fi
add_torch() {
  local about="$1/torch-$2.dist-info"
  mkdir -p "$1/torch" "$about"
  printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: %s\\n' "$2" >"$about/METADATA"
  cat >"$1/torch/__init__.py" <<PY
import os
from types import SimpleNamespace
__version__ = "${CALLED-$2}"
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(is_available=lambda: "GPU_WORKS" in os.environ)
PY
}
case "${1-} ${2-}" in
  "-m venv")
    echo "${@:2}" >>"$NOTES"
    rm -rf .venv/site && mkdir -p .venv/bin .venv/site
    shared=false
    if [[ "$*" == *--system* ]]; then shared=true; fi
    echo "include-system-site-packages = $shared" >.venv/pyvenv.cfg
    cp "$0" .venv/bin/python ;;
  "-m pip")
    shift 2
    [[ "$1" == --version ]] && exit 0
    echo "$*" | sed -E 's/ (--quiet|--disable-pip-version-check|--no-input)//g' >>"$NOTES"
    if [[ -n "${FAIL_AT-}" && "$*" == *"$FAIL_AT"* ]]; then exit 1; fi
    last=${!#}
    if [[ "$1" == uninstall ]]; then rm -rf "$top"/site/torch*; fi
    if [[ "$last" == torch==* ]]; then add_torch "$top/site" "${WHEEL-${last#torch==}}"; fi
    if [[ "$last" == ".[test]" && -n "${REPLACED_BY-}" ]]; then
      rm -rf "$top"/site/torch*
      add_torch "$top/site" "$REPLACED_BY"
    fi
    if [[ "$last" == ".[test]" && -n "${BREAKS-}" ]]; then
      echo "import $BREAKS" >"$top/site/torch/__init__.py"
    fi ;;
  "add torch") add_torch "$top/site" "$3" ;;
  *) PYTHONPATH="$packages" exec "$REAL_PYTHON" -S -s "$@" ;;
esac
"""


# Stands for the real one, whose own tests build: says what it was asked for, and fails on demand.
FAKE_BUILD = """import os, sys
if "BUILD_FAILS" in os.environ:
    sys.exit("build: error: there is no compiler")
open(os.environ["BUILDS"], "a").write(" ".join(sys.argv[1:]) + chr(10))
"""


class SetUp:
    """A copy of the files that the script reads, beside a fake interpreter."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        (self.project / "tools").mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "tools/setup_environment.sh"):
            shutil.copy(ROOT / name, self.project / name)
        (self.project / "csrc").mkdir()
        (self.project / "csrc" / "build.py").write_text(FAKE_BUILD)
        self.builds = folder / "builds"
        self.bin = folder / "system" / "bin"
        self.bin.mkdir(parents=True)
        self.add_program("python3", FAKE_PYTHON)
        self.notes = folder / "notes"
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "NOTES": str(self.notes),
            "BUILDS": str(self.builds),
            "REAL_PYTHON": sys.executable,
            "SYSTEM_SITE": str(folder / "system" / "site"),
        }

    def add_program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def add_torch(self, version: str, **variables: str) -> None:
        command = [self.bin / "python3", "add", "torch", version]
        subprocess.run(command, env={**self.environment, **variables}, check=True)

    def constraint(self) -> Requirement:
        """What the other requirements are installed under."""
        return Requirement((self.project / ".venv/torch-constraint.txt").read_text().strip())

    def run(self, **variables: str) -> tuple[int, str, list[str]]:
        """(exit code, output, what venv and pip were asked to do)."""
        self.notes.write_text("")
        done = subprocess.run(
            ["bash", "tools/setup_environment.sh"],
            cwd=self.project,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,  # a real pip on a busy machine
        )
        return done.returncode, done.stdout, self.notes.read_text().splitlines()


@pytest.fixture
def setup(tmp_path: Path) -> SetUp:
    return SetUp(tmp_path)


FRESH = [
    "venv --clear .venv",
    "install setuptools>=77",
    "uninstall --yes torch",
    "install torch==2.13.0",
    INSTALL_PACKAGE,
]


def test_a_bare_machine_gets_the_pinned_torch_and_the_second_call_does_nothing(
    setup: SetUp,
) -> None:
    code, output, notes = setup.run()
    assert code == 0, output
    assert notes == FRESH
    assert str(setup.constraint()) == "torch==2.13.0"
    assert setup.run() == (0, "", [])
    # The host library before anything is downloaded, the rest at the end; then what has changed.
    assert setup.builds.read_text().splitlines() == ["host", "all", "all --quiet"]


def test_a_missing_compiler_is_said_before_anything_is_downloaded(setup: SetUp) -> None:
    code, output, notes = setup.run(BUILD_FAILS="1")
    assert code == 1 and "there is no compiler" in output and "cannot be built" in output
    assert notes == []


@pytest.mark.parametrize("version", ["2.11.0a0+gitabc", "2.11.0", "2.14.1+cu130", "3.0.0"])
def test_an_interpreter_with_a_recent_torch_keeps_it(setup: SetUp, version: str) -> None:
    setup.add_torch(version)
    code, output, notes = setup.run()
    assert code == 0, output
    assert notes == [
        "venv --clear --system-site-packages .venv",
        "install setuptools>=77",
        INSTALL_PACKAGE,
    ]
    assert setup.constraint().specifier.contains(version)


# What a wheel's metadata and its torch.__version__ say: the package index's, those of the wheel
# indices, a build from source (a container's), and every other way round.
SHAPES = [
    ("2.13.0", "2.13.0"),
    ("2.13.0", "2.13.0+cu130"),
    ("2.13.0", "2.13.0+cpu"),
    ("2.13.0+cpu", "2.13.0+cpu"),
    ("2.13.0+cu130", "2.13.0"),
    ("2.13.0+cu130", "2.13.0+cu130"),
    ("2.13.0a0", "2.13.0a0+git1a2b3c4"),
    ("2.13.0a0+git1a2b3c4", "2.13.0a0+git1a2b3c4"),
    ("2.13.0a0+1a2b3c4.nv26.2", "2.13.0a0"),
    ("2.14.0.dev20261101+cu130", "2.14.0.dev20261101"),
    ("2.13.1", "2.13.0+cu130"),  # a rebuilt wheel
]


def check_shape(setup: SetUp, metadata: str, called: str) -> None:
    """After a set-up: complete, said by one name, and under a constraint that every build of this
    version satisfies, by whichever of its names.
    """
    assert setup.run(CALLED=called) == (0, "", [])
    specifier = setup.constraint().specifier
    public = metadata.partition("+")[0]
    for name in (metadata, public, f"{public}+cu130", f"{public}+cpu", f"{public}+git1a2b3c4"):
        assert specifier.contains(name), (name, specifier)


@pytest.mark.parametrize(("metadata", "called"), SHAPES)
def test_every_shape_of_wheel_installs(setup: SetUp, metadata: str, called: str) -> None:
    code, output, notes = setup.run(WHEEL=metadata, CALLED=called)
    assert code == 0, output
    assert notes == FRESH
    assert f"torch {metadata}, in .venv" in output
    check_shape(setup, metadata, called)
    with (setup.project / "setup.py").open("a") as file:
        file.write("# changed\n")
    assert f"keeping torch {metadata}\n" in setup.run(CALLED=called)[1]  # not installed again


@pytest.mark.parametrize(("metadata", "called"), SHAPES)
def test_every_shape_of_an_interpreters_torch_is_kept(
    setup: SetUp, metadata: str, called: str
) -> None:
    setup.add_torch(metadata, CALLED=called)
    code, output, notes = setup.run(CALLED=called)
    assert code == 0, output
    assert notes[0] == "venv --clear --system-site-packages .venv"
    assert f"keeping torch {metadata}\n" in output
    assert not [note for note in notes if "torch==" in note]
    check_shape(setup, metadata, called)


def test_a_torch_that_the_requirements_replace_is_an_error(setup: SetUp) -> None:
    for other in ("2.12.0", "2.13.0+cu130"):
        code, output, _ = setup.run(REPLACED_BY=other)
        assert code == 1
        assert f"replaced torch 2.13.0 by torch {other}" in output
    assert setup.run()[0] == 0  # starts afresh


def test_a_torch_that_does_not_import_is_an_error(setup: SetUp) -> None:
    code, output, _ = setup.run(BREAKS="libtorch_cuda")
    assert code == 1
    assert "No module named 'libtorch_cuda'" in output
    assert "torch 2.13.0 does not import from .venv: see above" in output


def test_a_local_version_that_the_index_does_not_list_is_explained(setup: SetUp) -> None:
    code, output, _ = setup.run(TORCH="torch==2.13.0+cu130", FAIL_AT="torch==2.13.0+cu130")
    assert code == 1
    assert "pip cannot install torch==2.13.0+cu130" in output
    assert "torch==2.13.0 names any build" in output
    assert "names any build" not in setup.run(FAIL_AT="torch==2.13.0")[1]


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], *requires: str
) -> None:
    """A wheel of pure Python."""
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {text}\n" for text in requires)
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {**files, f"{about}/METADATA": metadata, f"{about}/WHEEL": kind}
    record = "".join(f"{path},,\n" for path in (*content, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**content, f"{about}/RECORD": record}.items():
            wheel.writestr(path, text)


# Builds megamuon's stand-in: an editable wheel, which requires what requires torch.
FAKE_BACKEND = """import shutil
WHEEL = "megamuon-1.0-py3-none-any.whl"
def get_requires_for_build_editable(config_settings=None):
    return []
def build_editable(folder, config_settings=None, metadata_directory=None):
    shutil.copy(f"../wheels/{WHEEL}", folder)
    return WHEEL
"""


@pytest.fixture
def real(setup: SetUp, tmp_path: Path) -> SetUp:
    """A set-up with this interpreter's venv and pip, and no index but a folder of wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "setuptools", "77.0", {"setuptools.py": ""})
    write_wheel(wheels, "extra", "1.0", {"extra.py": ""}, "torch>=2.11")
    write_wheel(wheels, "megamuon", "1.0", {"megamuon.py": ""}, 'extra; extra == "test"')
    (setup.project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (setup.project / "backend.py").write_text(FAKE_BACKEND)
    (setup.bin / "python3").unlink()
    setup.environment |= {
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    return setup


# The newer one is what pip would take, were the constraint not there or not satisfied.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "called"), [("2.13.0", "2.13.0+cu130"), ("2.13.0a0+git1a2b3c4", "2.13.0a0")]
)
def test_pip_and_venv_themselves(real: SetUp, tmp_path: Path, metadata: str, called: str) -> None:
    wheels = tmp_path / "wheels"
    for number in (metadata, "2.99.0"):
        code = {"torch/__init__.py": f'__version__ = "{called}"\n'}
        write_wheel(wheels, "torch", number, code)
    asked = f"torch=={metadata.partition('+')[0]}"
    code, output, _ = real.run(TORCH=asked)
    assert code == 0, output
    assert f"torch {metadata}, in .venv" in output
    assert real.run() == (0, "", [])
    assert torches(real) == [f"torch-{metadata}.dist-info"]


@pytest.mark.slow
def test_pip_and_venv_themselves_keep_an_interpreters_torch(real: SetUp) -> None:
    code, output, _ = real.run()
    assert code == 0, output
    assert f"keeping torch {version('torch')}\n" in output
    assert torches(real) == []
    assert real.run() == (0, "", [])


def torches(setup: SetUp) -> list[str]:
    """The torches that lie in the environment itself."""
    return [path.name for path in (setup.project / ".venv").rglob("torch-*.dist-info")]


@pytest.mark.parametrize("version", ["2.10.1+cu128", "1.13.0"])
def test_an_old_torch_of_the_interpreter_is_not_used(setup: SetUp, version: str) -> None:
    setup.add_torch(version)
    assert setup.run()[2] == FRESH


def test_torch_and_its_index_can_be_chosen(setup: SetUp) -> None:
    setup.add_torch("2.13.0")  # the interpreter's own does not answer an explicit request
    chosen = {"TORCH": "torch==2.14.1", "TORCH_INDEX": "https://example.invalid/wheels"}
    _, output, notes = setup.run(**chosen)
    assert notes[0] == "venv --clear .venv", output
    assert "install --index-url https://example.invalid/wheels torch==2.14.1" in notes
    assert setup.run() == (0, "", [])  # remembered
    assert setup.run(**chosen) == (0, "", [])
    assert setup.run(TORCH="torch==2.12.0")[2][1:3] == [
        "uninstall --yes torch",
        "install torch==2.12.0",
    ]
    code, output, _ = setup.run(TORCH="torch==2.9.0")
    assert code == 1
    assert "torch >= 2.11 is needed, and TORCH=torch==2.9.0 is not" in output


def test_an_interrupted_set_up_starts_afresh(setup: SetUp) -> None:
    for step in ("torch==2.13.0", "-e .[test]"):
        assert setup.run(FAIL_AT=step)[0] != 0
        code, output, notes = setup.run()
        assert code == 0
        assert "did not finish" in output
        assert notes == FRESH
        assert setup.run() == (0, "", [])
        with (setup.project / "setup.py").open("a") as file:
            file.write("# changed\n")


def test_a_change_of_the_metadata_installs_again_and_keeps_torch(setup: SetUp) -> None:
    setup.run(TORCH="torch==2.14.1")
    with (setup.project / "setup.py").open("a") as file:
        file.write("# changed\n")
    assert setup.run()[2] == ["install setuptools>=77", INSTALL_PACKAGE]
    assert setup.run(TORCH="torch==2.14.1") == (0, "", [])


def test_a_broken_environment_is_made_anew(setup: SetUp) -> None:
    setup.run()
    (setup.project / ".venv/bin/python").unlink()  # e.g. the system's interpreter was replaced
    assert setup.run()[2][0] == "venv --clear .venv"
    assert setup.run() == (0, "", [])


def test_gpus_that_torch_cannot_use_are_an_error(setup: SetUp) -> None:
    setup.add_program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    for _ in range(2):  # also when the environment is complete
        code, output, _ = setup.run()
        assert code == 1
        assert "torch.cuda.is_available() is False" in output
        assert "TORCH_INDEX=" in output
    code, output, _ = setup.run(CUDA_VISIBLE_DEVICES="")
    assert code == 0
    assert "running on the CPU, as asked" in output
    assert setup.run(GPU_WORKS="1", CUDA_VISIBLE_DEVICES="0") == (0, "", [])


def test_a_driver_without_gpus_is_no_error(setup: SetUp) -> None:
    setup.add_program("nvidia-smi", "#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert setup.run()[0] == 0


def test_a_missing_interpreter_names_the_packages_to_install(setup: SetUp) -> None:
    code, output, _ = setup.run(PYTHON="python3.99")
    assert code == 1
    assert "no interpreter 'python3.99'" in output
    assert "apt-get install -y" in output
    assert not os.path.exists(setup.project / ".venv")
