"""README, Makefile and metadata agree with each other and with what the code imports."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megamuon.arguments import parse_config
from megamuon.arguments.config import specs_by_dest
from megamuon.models.presets import PRESETS
from tests.support.layering import PACKAGE, read_sources

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("README.md", "Makefile", "setup.py", "pyproject.toml", ".ci/run")

# Import names that differ from the distribution's name.
DISTRIBUTION = {"transformer_engine": "transformer-engine"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def requirements() -> dict[str, set[str]]:
    """Distribution names by extra; "" are those of every install."""
    script = (
        "import json, setuptools, runpy\n"
        "kept = {}\n"
        "setuptools.setup = lambda **k: kept.update(k)\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
        "print(json.dumps({'': kept['install_requires'], **kept['extras_require']}))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {
        extra: {Requirement(text).name for text in texts}
        for extra, texts in json.loads(output).items()
    }


@pytest.mark.parametrize("name", ["setup", "pretrain", "test", "lint", "device-compile", "clean"])
def test_the_fixed_targets_exist(name: str) -> None:
    assert name in make_targets()


def test_every_make_command_of_the_readme_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", read("README.md")))
    assert {"pretrain", "test"} <= named
    assert named - {"python"} <= make_targets()  # "make python3" stands in the apt line


def test_files_and_folders_that_the_readme_names_exist() -> None:
    text = read("README.md")
    named = re.findall(r"`((?:[\w.-]+/)+[\w.*-]*|[\w-]+\.(?:md|py|sh))`", text)
    assert named
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing, f"README.md names what is not there: {missing}"


def test_readme_starts_with_what_a_bare_debian_needs() -> None:
    commands = re.findall(r"```(?:bash|sh)\n(.*?)```", read("README.md"), re.DOTALL)
    assert commands[0].startswith("apt-get install -y git g++ make python3 python3-venv\n")


# Flags of torchrun and pip that the README shows.
OTHERS = {"--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr"}
OTHERS |= {"--master-port", "--shm-size", "--no-build-isolation", "--system-site-packages"}
OTHERS |= {"--max-restarts"}
MEGATRONS = {"--muon-no-split-qkv"}  # in the column of its recipe


def test_flags_that_the_readme_names_exist() -> None:
    ours = {name for s in specs_by_dest().values() for name in (*s.names, *s.off_names)}
    tools = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tools/**/*.py"))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", read("README.md")))
    assert named & ours
    for flag in named - OTHERS - MEGATRONS - ours:
        assert f'"{flag}"' in tools, flag


def test_the_training_commands_of_the_readme_are_accepted() -> None:
    text = read("README.md").replace("\\\n", " ")
    commands = re.findall(r"^torchrun (.*?) pretrain_gpt\.py (.*)$", text, re.MULTILINE)
    assert commands
    for launcher, flags in commands:
        world = int(launcher.split()[-1])
        parse_config(flags.split(), presets=PRESETS, world_size=world)


@pytest.mark.parametrize("dest", ["line", "optimizer", "owner_planner", "collectives"])
def test_the_readme_shows_every_choice(dest: str) -> None:
    text = read("README.md")
    for choice in specs_by_dest()[dest].choices:
        assert f"`{choice}`" in text or f"--{dest} {choice}" in text, choice


def test_the_readme_shows_every_preset() -> None:
    text, family = read("README.md"), ""
    listed = set()
    for name in re.findall(r"`([\w.-]+)`", text[text.index("* Presets:") :].split("Explicit")[0]):
        family = name.rsplit("-", 1)[0] if not name.startswith("-") else family
        listed.add(family + name if name.startswith("-") else name)
    assert listed == set(PRESETS)


def test_the_python_of_the_readme_imports_what_there_is() -> None:
    imports = re.findall(r"^from ([\w.]+) import (.*)$", read("README.md"), re.MULTILINE)
    assert imports
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}: {name}"


@pytest.mark.parametrize("name", SHOWN)
def test_no_machine_paths(name: str) -> None:
    assert not re.search(r"/(work|home|root|tmp|Users)/", read(name))


def test_licence_is_apache_2() -> None:
    text = read("LICENSE")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license_expression="Apache-2.0"' in read("setup.py")


def versions_in(pattern: str, *names: str) -> set[str]:
    """What the group of ``pattern`` holds, wherever it occurs in these files."""
    found = [re.findall(pattern, read(name)) for name in names]
    assert all(found), (pattern, names)
    return {version for of_file in found for version in of_file}


def test_a_version_that_several_files_name_is_one_version() -> None:
    script = "tools/setup_environment.sh"
    assert versions_in(
        r"(?:Python|python_requires=\") ?(?:>=|≥) ?(3\.\d+)", "README.md", "setup.py", script
    ) == {"3.11"}
    assert versions_in(r"sys\.version_info < \((\d+, \d+)\)", script) == {"3, 11"}
    assert versions_in(r'target-version = "(py\d+)"', "pyproject.toml") == {"py311"}
    shown = ("README.md", "Makefile", "tools/README.md", script)
    assert versions_in(r"torch==(\d+\.\d+\.\d+)", *shown) == {"2.13.0"}
    assert versions_in(r"torch (?:>=|≥) (\d+\.\d+)", "README.md", "tools/README.md", script) == {
        "2.11"
    }


def test_the_readme_claims_the_pythons_of_the_classifiers() -> None:
    claimed = re.search(r"Tried are Python ([^;]*?), each", read("README.md"))
    assert claimed is not None
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("setup.py"))
    assert re.findall(r"3\.\d+", claimed[1]) == classified


def test_torch_is_in_no_requirement() -> None:
    assert re.search(r'^requires = \["setuptools>=77"\]$', read("pyproject.toml"), re.MULTILINE)
    everything = {name for names in requirements().values() for name in names}
    assert "torch" not in everything
    assert "apex" not in everything  # the index's package of that name is an unrelated one


def third_party_imports() -> dict[str, set[bool]]:
    """Distribution -> whether it is imported at import time (True) or late (False)."""
    found: dict[str, set[bool]] = {}
    local = {path.stem for path in ROOT.glob("tools/**/*.py")} | {PACKAGE, "tools", "setup"}
    for file in read_sources(ROOT):
        for name, _, at_import in file.imports:
            top = name.split(".")[0]
            if top in local or top.startswith("pretrain_") or top in sys.stdlib_module_names:
                continue
            found.setdefault(DISTRIBUTION.get(top, top), set()).add(at_import)
    return found


def test_what_is_imported_is_required() -> None:
    """At import time only what every install has; inside functions also what an extra brings."""
    declared = requirements()
    always = declared[""] | {"torch"}
    optional = always | {name for names in declared.values() for name in names} | {"apex"}
    imported = third_party_imports()
    assert {"torch", "numpy"} <= set(imported)
    for name, moments in imported.items():
        assert name in (always if True in moments else optional), (
            f"{name} is imported, but setup.py does not require it"
        )


def test_the_continuous_integration_runs_the_same_targets() -> None:
    named = set(re.findall(r"^ *make ([a-z-]+)$", read(".ci/run"), re.MULTILINE))
    assert named == {"lint", "device-compile", "test"}
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
