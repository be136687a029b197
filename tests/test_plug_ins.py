"""An optimizer, a transport, a planner policy and a preset, each added from here alone.

They are registered before the command line is parsed, train on two ranks, are saved, resumed bit
for bit, by other lines too, and planned for by ``tools/plan_owners.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.collectives import TRANSPORTS, Transport, TransportSettings, register_transport
from megamuon.collectives.grouped import GroupedTransport
from megamuon.flags import flag
from megamuon.models import PRESETS, register_preset
from megamuon.optim import RECIPES, Item, Recipe, Whole, Work, register
from megamuon.optim.matrix_rule import MatrixRule
from megamuon.ownership import (
    POLICIES,
    POLICY_UNITS,
    PlannerSettings,
    Topology,
    Unit,
    register_policy,
)
from tests.support.ranks import run_ranks
from tests.support.training import (
    Recorded,
    documents,
    flags,
    stored_tensors,
    train,
    use_launcher_variables,
)
from tools import plan_owners


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class RowsFlags:
    rows_momentum: float = flag(RowsConfig.momentum, "momentum of Rows", low=0.0, below=1.0)


class Rows(MatrixRule):
    """Momentum beside the pieces; each row over the root of its running mean square."""

    piece_names = ("average",)
    whole_names = ("row_square",)

    def __init__(self, config: RowsConfig) -> None:
        self.config = config

    def piece_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"average": shape}

    def whole_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"row_square": (shape[0], 1)}

    def prepare(self, item: Item) -> Tensor:
        return item.state["average"].lerp_(item.gradient, 1 - self.config.momentum)

    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        found = []
        for whole in wholes:
            square = whole.state["row_square"]
            square.lerp_(whole.matrix.square().mean(dim=1, keepdim=True), 0.1)
            found.append(whole.matrix / (square.sqrt() + 1e-8))
        return found

    def apply(self, item: Item, direction: Tensor) -> None:
        item.parameter.mul_(1 - item.lr * item.wd).add_(direction, alpha=-item.lr)


ROWS = Recipe(
    name="rows",
    settings=RowsConfig,
    build=Rows,
    flags=RowsFlags,
    from_flags=lambda flags, cpu_dtype: RowsConfig(momentum=flags.rows_momentum),
    describe=lambda settings, flags: [f"row momentum {settings.momentum}"],
    work=lambda settings, rows, cols: Work(4.0 * rows * cols, 0.0),
)

built: list[Transport] = []


class Noted(GroupedTransport):
    """Grouped calls under another name."""

    name = "noted"

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        built.append(self)


def backwards(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """In turns, from the last rank to the first."""
    return tuple(topology.world - 1 - i % topology.world for i in range(len(units)))


def add_all() -> None:
    register(ROWS)
    register_transport("noted", Noted)
    register_policy("backwards", backwards)
    register_preset("pico", {**PRESETS["nano"], "num_layers": 2})


@pytest.fixture
def added() -> Iterator[None]:
    """For this process, which runs other tests too."""
    add_all()
    yield
    for registry, name in (
        (RECIPES, "rows"),
        (TRANSPORTS, "noted"),
        (POLICIES, "backwards"),
        (POLICY_UNITS, "backwards"),
        (PRESETS, "pico"),
    ):
        del registry[name]  # type: ignore[attr-defined]


RUN = {
    "model": "pico",
    "optimizer": "rows",
    "rows_momentum": 0.8,
    "collectives": "noted",
    "owner_planner": "backwards",
    "train_iters": 4,
    "save_interval": 2,
}
# Which the second half of a run of line D at ZeRO-3 goes on with: pieces of matrices come together.
ELSEWHERE = {
    "slices": {"line": "B"},
    "stage 2": {"line": "C", "zero_stage": 2},
    "pairs": {"tensor_model_parallel_size": 2, "global_batch_size": 4},
    "slices of pairs": {"line": "B", "tensor_model_parallel_size": 2, "global_batch_size": 4},
}


def captured(words: list[str]) -> tuple[int, str, list[float]]:
    output, step = io.StringIO(), Recorded()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = train(words, step)
    return code, output.getvalue(), step.losses


def trained(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    if "rows" not in RECIPES:  # rank processes are kept from test to test
        add_all()
    runs = {
        "whole": captured(flags(**RUN, save=folder / "whole")),
        "half": captured(flags(**RUN, save=folder / "cut", exit_interval=2)),
        "rest": captured(flags(**RUN, save=folder / "cut", load=folder / "cut")),
        "other": captured(
            flags(**{**RUN, "rows_momentum": 0.7, "save_interval": None}, load=folder / "cut")
        ),
    }
    runs |= {
        name: captured(
            flags(**RUN, **changes, load=folder / "cut", ckpt_step=2, save=folder / name)
        )
        for name, changes in ELSEWHERE.items()
    }
    return {"runs": runs, "built": len(built)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plug_ins")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(trained, 2, folder)


def test_they_train_and_resume_bit_for_bit(results: list[dict[str, Any]], folder: Path) -> None:
    for result in results:
        runs = result["runs"]
        assert [runs[name][0] for name in ("whole", "half", "rest")] == [0, 0, 0], runs
        assert runs["half"][2][:2] + runs["rest"][2][:2] == runs["whole"][2][:4]
        assert result["built"] >= 3
    whole, cut = (stored_tensors(folder / name, 4) for name in ("whole", "cut"))
    assert any(".row_square." in name for name in whole)
    assert any(".average." in name for name in whole)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_line_goes_on_with_them(
    name: str, results: list[dict[str, Any]], folder: Path
) -> None:
    assert [result["runs"][name][0] for result in results] == [0, 0], results[0]["runs"][name][1]
    assert "collectives noted" in results[0]["runs"][name][1]
    wanted, found = (stored_tensors(folder / run, 4) for run in ("whole", name))
    assert wanted.keys() == found.keys()
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=1e-5, msg=key)


def test_they_are_told_and_compared(results: list[dict[str, Any]]) -> None:
    text = results[0]["runs"]["whole"][1]
    assert "optimizer rows | row momentum 0.8 | parameters by route: rows 14" in text
    assert "collectives noted" in text
    others = [result["runs"]["other"] for result in results]
    assert [code for code, *_ in others] == [1, 1]
    text = "".join(text for _, text, _ in others)  # the rank that fails first prints the line
    assert "rows_momentum is 0.8 in the checkpoint and 0.7 here (--rows-momentum)" in text


def test_the_plan_is_the_tools(
    results: list[dict[str, Any]], folder: Path, tmp_path: Path, added: None
) -> None:
    stored = documents(folder / "whole", 4)["plan"]
    words = ["--model", "pico", "--gpus-per-node", "2", "--optimizer", "rows"]
    words += ["--owner-planner", "backwards", "--plan", str(tmp_path / "plan")]
    with contextlib.redirect_stdout(io.StringIO()):
        plan_owners.main([*words, "--json", str(tmp_path / "figures")])
    made = json.loads((tmp_path / "plan").read_text())
    assert made["units"] == stored["units"]
    assert made["parameters"] == stored["parameters"]
    assert stored["settings"]["policy"] == "backwards"
    matrices = [entry for entry in stored["parameters"] if entry["route"] == "matrix"]
    assert {tuple(entry["update"]["shard"]) for entry in matrices} == {("owned", 0), ("owned", 1)}


def test_names_that_are_taken_are_refused(added: None) -> None:
    for again in (
        lambda: register(ROWS),
        lambda: register_transport("noted", Noted),
        lambda: register_transport("fsdp2", Noted),
        lambda: register_policy("backwards", backwards),
        lambda: register_preset("pico", {}),
    ):
        with pytest.raises(ValueError, match="there is one of this name"):
            again()
    with pytest.raises(ValueError, match="units='layers' is none of threshold, roles"):
        register_policy("forwards", backwards, units="layers")
