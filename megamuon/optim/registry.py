"""The registry of optimizer recipes.

Owns ``RECIPES``, the list of this package's recipes by name, and ``register``, which adds another:
a script calls it before it parses its command line, and ``--optimizer`` knows the name. Invariant:
nothing else in the package lists optimizers. Tested by ``tests/optim/test_recipes.py`` and
``tests/test_plug_ins.py``.
"""

from __future__ import annotations

from megamuon.optim.adamw import ADAM, SGD
from megamuon.optim.muon import MUON
from megamuon.optim.normuon import NORMUON
from megamuon.optim.recipe import Recipe
from megamuon.optim.shampoo import SHAMPOO
from megamuon.optim.soap import SOAP

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (MUON, ADAM, SGD, NORMUON, SHAMPOO, SOAP)
}


def register(recipe: Recipe) -> None:
    """Add an optimizer, on all ranks alike.  Raises ValueError for a name or a flag that is taken,
    and for a recipe that ``rest`` or ``reads`` names and that does not exist.
    """
    if recipe.name in RECIPES:
        raise ValueError(f"optimizer {recipe.name!r}: there is one of this name")
    for other in RECIPES.values():
        if taken := sorted(recipe.dests & other.dests):
            raise ValueError(
                f"optimizer {recipe.name!r}: its flag {taken[0]!r} belongs to {other.name!r}; name"
                f" {other.name!r} in reads to share it"
            )
    for name in (recipe.rest, *recipe.reads):
        if name not in RECIPES and name != recipe.name:
            raise ValueError(
                f"optimizer {recipe.name!r}: it names {name!r}; there are {', '.join(RECIPES)}"
            )
    RECIPES[recipe.name] = recipe


def rest_of(name: str) -> Recipe:
    """Of what ``name`` does not train as whole matrices: its own recipe if it needs none whole."""
    recipe = RECIPES[name]
    return RECIPES[recipe.rest] if recipe.whole else recipe


def flags_of(name: str) -> frozenset[str]:
    """The optimizer flags, by dest, that a run with this optimizer reads."""
    recipe = RECIPES[name]
    read = (recipe, rest_of(name), *(RECIPES[other] for other in recipe.reads))
    return frozenset().union(*(one.dests for one in read))


def flags_of_all() -> frozenset[str]:
    """The flags, by dest, that belong to some optimizer."""
    return frozenset().union(*(recipe.dests for recipe in RECIPES.values()))
