"""The tools' page names what is there, and its commands and figures can be read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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
        assert re.search(rf"^## `{re.escape(name)}`", tools_page(), re.MULTILINE), name
    else:
        assert f"`{name}`" in tools_page()


def test_the_page_names_no_tool_that_is_not_there() -> None:
    named = set(re.findall(r"tools/[\w/]+\.(?:py|sh)", tools_page()))
    headings = re.findall(r"^## `([^`]+)`", tools_page(), re.MULTILINE)
    assert named and headings
    for name in named | {f"tools/{heading}" for heading in headings}:
        assert (ROOT / name).exists(), name


def test_the_files_that_the_page_shows_are_json() -> None:
    shown = re.findall(r"```json\n(.*?)```", tools_page(), re.DOTALL)
    assert len(shown) >= 6
    for text in shown:
        json.loads(text)


def option_names(tool: Path) -> set[str]:
    """Flags that a tool's source adds to its parser."""
    found = set()
    for node in ast.walk(ast.parse(tool.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {str(name) for name in found}


@pytest.mark.slow
def test_every_tool_answers_help() -> None:
    tools = [tool for tool in TOOLS if runs_by_itself(tool)]

    def ask(tool: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(tool), "--help"], capture_output=True, text=True, timeout=120
        )

    with ThreadPoolExecutor(2) as pool:
        answers = dict(zip(tools, pool.map(ask, tools), strict=True))
    for tool, answer in answers.items():
        assert answer.returncode == 0, f"{tool.name}: {answer.stderr}"
        assert "usage:" in answer.stdout
        for option in option_names(tool):
            assert option in answer.stdout, f"{tool.name} --help does not show {option}"


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
