"""An optimizer is known by its recipe alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megamuon.flags import flag
from megamuon.optim import RECIPES, Recipe, register, rest_of, state_sizes
from megamuon.optim.recipe import NoFlags
from megamuon.optim.registry import flags_of, flags_of_all

PACKAGE = Path(__file__).resolve().parents[2] / "megamuon"
WHOLE = [name for name, recipe in RECIPES.items() if recipe.whole]


@pytest.mark.parametrize("name", RECIPES)
def test_state_is_what_the_optimizer_makes(name: str) -> None:
    optimizer = RECIPES[name].build(RECIPES[name].settings())
    sizes = state_sizes(optimizer)
    for shape in ((12, 7), (7, 12), (5, 5)):
        made = optimizer.init_state(torch.zeros(shape)).values()
        held = sum(tensor.numel() for tensor in made if tensor.ndim)
        assert sizes.piece * shape[0] * shape[1] + sizes.whole(*shape) == held


def test_state_of_optimizers_that_hold_more() -> None:
    def of(name: str) -> tuple[int, int]:
        sizes = state_sizes(RECIPES[name].build(RECIPES[name].settings()))
        return sizes.piece, sizes.whole(30, 20)

    assert of("muon") == (1, 0)
    assert of("normuon") == (1, 30)
    assert of("adam") == (2, 0)
    assert of("sgd") == (1, 0)
    assert of("shampoo") == (0, 30 * 20 + 2 * (30 * 30 + 20 * 20))
    assert of("soap") == (0, 2 * 30 * 20 + 2 * (30 * 30 + 20 * 20))


@pytest.mark.parametrize("name", WHOLE)
def test_a_trial_is_a_whole_update(name: str) -> None:
    recipe = RECIPES[name]
    settings = recipe.settings()
    update = recipe.trial(settings, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    for _ in range(recipe.period(settings) + 1):
        (direction,) = update()  # type: ignore[misc]
    assert direction.shape == (6, 4)
    assert direction.abs().sum() > 0


def test_work_counts_what_an_update_does() -> None:
    shampoo, soap = RECIPES["shampoo"], RECIPES["soap"]
    settings = shampoo.settings(precondition_frequency=1)
    n = 64
    # Square, one block: 4 * 2 n^3 of products and two roots, each 9 n^3 and a product.
    assert shampoo.work(settings, n, n) == (8 * n**3 + 4 * n**3, 18 * n**3)
    rare = shampoo.settings(precondition_frequency=100)
    assert shampoo.work(rare, n, n).factorizations == 18 * n**3 / 100
    split = shampoo.settings(max_preconditioner_dim=n // 2)
    assert shampoo.work(split, n, n).factorizations == 4 * 18 * (n // 2) ** 3
    narrow = soap.settings(max_precond_dim=32)  # no basis on either side: element by element
    assert soap.work(narrow, n, n) == (0, 0)
    assert soap.work(soap.settings(), n, 32) == soap.work(soap.settings(), 32, n)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("muon", "adam", "sgd")])
def test_an_optimizer_is_named_in_one_file(name: str) -> None:
    home = inspect.getsourcefile(RECIPES[name].build)
    files = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    named = [str(path) for path, text in files.items() if f'"{name}"' in text]
    assert named == [home]


def test_flags_hold_for_those_who_read_them() -> None:
    assert {"muon_momentum", "normuon_beta2", "adam_eps"} <= flags_of("normuon")
    assert "normuon_beta2" not in flags_of("muon")
    assert flags_of("sgd") == {"sgd_momentum"}
    assert "adam_beta1" not in flags_of("sgd")
    assert "weight_decay" not in flags_of_all()
    assert rest_of("soap") is rest_of("adam") is RECIPES["adam"]
    assert rest_of("sgd") is RECIPES["sgd"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_flag_is_made_a_setting(name: str) -> None:
    """A flag that ``from_flags`` forgets would have no effect."""
    text = inspect.getsource(RECIPES[name].from_flags)
    elsewhere = {"muon_fp32_matmul_prec"}  # of torch, set when a run starts
    unread = [dest for dest in RECIPES[name].dests - elsewhere if f"flags.{dest}" not in text]
    assert not unread


@dataclass(frozen=True, kw_only=True)
class OtherFlags:
    soap_eps: float = flag(0.5, "of another optimizer")


def test_what_cannot_be_registered() -> None:
    muon = RECIPES["muon"]
    other = replace(muon, name="other", flags=OtherFlags)
    with pytest.raises(ValueError, match="optimizer 'muon': there is one of this name"):
        register(muon)
    with pytest.raises(ValueError, match="its flag 'soap_eps' belongs to 'soap'"):
        register(other)
    with pytest.raises(ValueError, match="it names 'adagrad'; there are muon"):
        register(replace(other, flags=NoFlags, rest="adagrad"))
    with pytest.raises(ValueError, match="says what an update costs"):
        Recipe(name="x", settings=int, build=int, from_flags=int)  # type: ignore[arg-type]
    assert "other" not in RECIPES
