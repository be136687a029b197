"""The tools' page names what is there, and its commands and figures can be read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.figures import TABLE, described, write_json

ROOT = Path(__file__).resolve().parents[1]
TOOLS = sorted([*ROOT.glob("tools/*.py"), *ROOT.glob("tools/bench/*.py")])
TOOLS = [path for path in TOOLS if path.name != "__init__.py"]


def name_of(path: Path) -> str:
    return path.name


def runs_by_itself(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text(encoding="utf-8")


def tools_page() -> str:
    return (ROOT / "tools" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tool", TOOLS, ids=name_of)
def test_the_page_names_every_tool(tool: Path) -> None:
    name = tool.relative_to(ROOT / "tools").as_posix()
    if runs_by_itself(tool):
        assert re.search(rf"^### `{re.escape(name)}`", tools_page(), re.MULTILINE), name
    else:
        assert f"`{name}`" in tools_page()


def test_the_page_names_no_tool_that_is_not_there() -> None:
    named = set(re.findall(r"tools/[\w/]+\.(?:py|sh)", tools_page()))
    headings = re.findall(r"^### `([^`]+)`", tools_page(), re.MULTILINE)
    assert named and headings
    for name in named | {f"tools/{heading}" for heading in headings}:
        assert (ROOT / name).exists(), name


def test_the_keys_of_every_json_file_are_described() -> None:
    """``figures.json`` has the tools that take --json, each of which writes by ``write_json``."""
    texts = {path: path.read_text(encoding="utf-8") for path in TOOLS}
    flag = "add_json_flag("
    taking = {path for path, text in texts.items() if flag in text and path.name != "figures.py"}
    named = {path.relative_to(ROOT / "tools").as_posix() for path in taking}
    assert named == set(json.loads(TABLE.read_text(encoding="utf-8")))
    for path in taking:
        assert "write_json(" in texts[path], path.name
        assert not re.search(r"\.json\)?\.write_text", texts[path]), path.name
    for path in set(TOOLS) - taking:
        assert path.name == "figures.py" or '"--json"' not in texts[path], path.name


def test_a_key_that_is_not_described_is_an_error(tmp_path: Path) -> None:
    script, path = str(ROOT / "tools" / "generate.py"), tmp_path / "out.json"
    write_json(path, script, {"prompt": "a", "continuation": "b"})
    assert json.loads(path.read_text()) == {"prompt": "a", "continuation": "b"}
    with pytest.raises(ValueError, match="generate.py writes ratio, seconds: say what in"):
        write_json(path, script, {"prompt": "c", "seconds": 1, "ratio": 2})
    assert json.loads(path.read_text())["prompt"] == "c"  # nothing measured is lost
    write_json(None, script, {"prompt": "d", "seconds": 1})


def option_names(tool: Path) -> set[str]:
    """Flags that a tool's source adds to its parser."""
    found = set()
    for node in ast.walk(ast.parse(tool.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {str(name) for name in found}


# Starts every tool as a script in a fork of one interpreter, since each would import torch anew.
ASK_ALL = """
import os, runpy, sys
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
import megamuon.training.pretrain

folder, *tools = sys.argv[1:]
for number, tool in enumerate(tools):
    child = os.fork()
    if not child:
        answer = os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_WRONLY)
        os.dup2(answer, 1), os.dup2(answer, 2)
        sys.argv, sys.path[0], status = [tool, "--help"], os.path.dirname(tool), 0
        try:
            runpy.run_path(tool, run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_every_tool_answers_help(tmp_path: Path) -> None:
    tools = [tool for tool in TOOLS if runs_by_itself(tool)]

    command = [sys.executable, "-c", ASK_ALL, str(tmp_path), *map(str, tools)]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert len(asked.stdout.splitlines()) == len(tools)
    for tool, status in zip(tools, asked.stdout.split(), strict=True):
        answer = (tmp_path / str(tools.index(tool))).read_text(encoding="utf-8")
        assert status == "0", f"{tool.name}: {answer}"
        assert "usage:" in answer
        for option in option_names(tool):
            assert option in answer, f"{tool.name} --help does not show {option}"
        if "add_json_flag(" in tool.read_text(encoding="utf-8"):
            for key, text in described(str(tool)).items():
                line = f"{key}: {text}" if text else key
                assert line in " ".join(answer.split()), f"{tool.name}: {key}"


def source_of(tool: Path) -> str:
    """The text of a tool, and of the other tools that it imports, whose flags it may share."""
    own = tool.read_text(encoding="utf-8")
    imported = " ".join(re.findall(r"^(?:from|import) .*$", own, re.MULTILINE))
    others = [other for other in TOOLS if re.search(rf"\b{other.stem}\b", imported)]
    return own + "".join(other.read_text(encoding="utf-8") for other in others)


def test_commands_of_the_page_use_flags_that_exist() -> None:
    """Every `python tools/X ...` line, joined where it ends in a backslash."""
    text = tools_page().replace("\\\n", " ")
    commands = re.findall(r"^python (tools/[\w/]+\.py)(.*)$", text, re.MULTILINE)
    assert len(commands) >= len([tool for tool in TOOLS if runs_by_itself(tool)])
    for tool, rest in commands:
        source = source_of(ROOT / tool)
        for flag in re.findall(r"--[\w-]+", rest):
            assert f'"{flag}"' in source, f"{tool}: {flag}"
