"""What holds for every matrix optimizer: pieces equal the whole, state is stable and storable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.optim.matrix_rule import MatrixRule
from megamuon.optim.muon import Muon, MuonConfig
from megamuon.optim.normuon import NorMuon, NorMuonConfig
from megamuon.optim.optimizer import Item, MatrixOptimizer, OwnerOptimizer, Whole
from megamuon.optim.shampoo import GraftingConfig, Shampoo, ShampooConfig
from megamuon.optim.soap import Soap, SoapConfig

MAKERS: dict[str, Callable[[], MatrixRule]] = {
    "muon": lambda: Muon(MuonConfig()),
    "muon plain": lambda: Muon(MuonConfig(nesterov=False, decay_order="after_update")),
    "muon torch": lambda: Muon(MuonConfig.torch_preset()),
    "normuon": lambda: NorMuon(NorMuonConfig()),
    "normuon longer": lambda: NorMuon(NorMuonConfig(neurons="longer_dim")),
    "shampoo": lambda: Shampoo(ShampooConfig()),
    "shampoo l2": lambda: Shampoo(ShampooConfig(beta1=0.0, beta2=0.9, decay="l2")),
    "shampoo blocks": lambda: Shampoo(
        ShampooConfig(
            beta2=0.99,
            precondition_frequency=2,
            max_preconditioner_dim=4,
            grafting=GraftingConfig(rule="adam"),
        )
    ),
    "soap": lambda: Soap(SoapConfig(precondition_frequency=2)),
    "soap one side": lambda: Soap(SoapConfig(max_precond_dim=7, normalize_gradient=True)),
    "soap fixed": lambda: Soap(SoapConfig(precondition_frequency=2, null_space="fixed")),
    "soap fb": lambda: Soap(SoapConfig(variant="fb", precondition_frequency=2)),
}
ALL = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
ROWS, COLS, STEPS = 7, 10, 6


def item(name: str, weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Item:
    return Item(name, weight, gradient, state, 0.02, 0.1, (ROWS, COLS))


def step_in_pieces(
    optimizer: MatrixOptimizer, pieces: list[Item], whole: dict[str, Tensor], dim: int
) -> None:
    inputs = [optimizer.prepare(piece) for piece in pieces]
    for part, piece in zip(inputs, pieces, strict=True):
        assert part.shape == piece.parameter.shape
    (direction,) = optimizer.directions([Whole("weight", torch.cat(inputs, dim), whole)])
    assert direction.shape == (ROWS, COLS)
    kept = direction.clone()
    sizes = [piece.parameter.shape[dim] for piece in pieces]
    for piece, part in zip(pieces, direction.split(sizes, dim), strict=True):
        optimizer.apply(piece, part)
    assert torch.equal(direction, kept)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("dim", "sizes"), [(0, (3, 3, 1)), (0, (4, 0, 3)), (1, (6, 4))])
def test_pieces_are_the_whole_bit_for_bit(
    maker: Callable[[], MatrixRule], dtype: torch.dtype, dim: int, sizes: tuple[int, ...]
) -> None:
    optimizer = maker()
    weight = torch.randn(ROWS, COLS, dtype=dtype)
    before = weight.clone()
    parts = [part.clone() for part in weight.split(sizes, dim)]
    state = optimizer.init_state(weight)
    beside = [optimizer.init_piece(part) for part in parts]
    whole = optimizer.init_whole((ROWS, COLS), dtype, weight.device)
    for _ in range(STEPS):
        gradient = torch.randn(ROWS, COLS, dtype=dtype)
        kept = gradient.clone()
        cut = [part.clone() for part in gradient.split(sizes, dim)]
        pieces = [item("weight", *piece) for piece in zip(parts, cut, beside, strict=True)]
        step_in_pieces(optimizer, pieces, whole, dim)
        optimizer.update([item("weight", weight, gradient, state)])
        assert torch.equal(torch.cat(parts, dim), weight)
        assert torch.equal(gradient, kept)
    for name in optimizer.whole_names:
        assert torch.equal(whole[name], state[name])
    for name in optimizer.piece_names:
        if state[name].ndim:
            assert torch.equal(torch.cat([piece[name] for piece in beside], dim), state[name])
        else:
            assert all(torch.equal(piece[name], state[name]) for piece in beside)
    assert not torch.equal(weight, before)


@ALL
def test_state_is_stable_and_resumes_bit_for_bit(maker: Callable[[], MatrixRule]) -> None:
    optimizer = maker()
    weight = torch.randn(ROWS, COLS)
    state = optimizer.init_state(weight)
    made = {name: (value.shape, value.dtype) for name, value in state.items()}
    addresses = {name: value.data_ptr() for name, value in state.items()}
    gradients = [torch.randn(ROWS, COLS) for _ in range(STEPS)]
    for index, gradient in enumerate(gradients):
        if index in (1, 4):  # after the step that SOAP skips, and later
            other, resumed = maker(), weight.clone()
            loaded = other.init_state(resumed)
            for name, value in state.items():
                loaded[name].copy_(value)
            other_weight, other_state = resumed, loaded
        optimizer.update([item("weight", weight, gradient, state)])
        if index >= 1:
            other.update([item("weight", other_weight, gradient, other_state)])
            assert torch.equal(other_weight, weight)
    assert set(state) == set(optimizer.state_names)
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == made
    assert {name: value.data_ptr() for name, value in state.items()} == addresses
    for name, value in state.items():
        counts = value.ndim == 0
        assert value.device.type == "cpu"
        assert value.dtype == torch.float32
        assert value.is_contiguous()
        assert not counts or name in ("step", "whole_step", "failed_inversions")


@ALL
def test_many_items_one_callback_each_after_its_change(maker: Callable[[], MatrixRule]) -> None:
    optimizer, alone = maker(), maker()
    weights = [torch.randn(ROWS, COLS) for _ in range(3)]
    copies = [weight.clone() for weight in weights]
    states = [optimizer.init_state(weight) for weight in weights]
    single = [alone.init_state(weight) for weight in copies]
    for _ in range(3):
        gradients = [torch.randn(ROWS, COLS) for _ in range(3)]
        seen: dict[str, Tensor] = {}

        def updated(done: Item, seen: dict[str, Tensor] = seen) -> None:
            assert done.name not in seen
            seen[done.name] = done.parameter.clone()

        named = zip("abc", weights, gradients, states, strict=True)
        optimizer.update([item(*entry) for entry in named], updated)
        assert list(seen) == ["a", "b", "c"]
        for weight, value in zip(weights, seen.values(), strict=True):
            assert torch.equal(weight, value)
        for weight, gradient, state in zip(copies, gradients, single, strict=True):
            alone.update([item("weight", weight, gradient, state)])
    for weight, copy in zip(weights, copies, strict=True):
        assert torch.equal(weight, copy)


@ALL
def test_views_are_updated_in_place_and_nothing_else(maker: Callable[[], MatrixRule]) -> None:
    optimizer = maker()
    start, end = 8, 8 + ROWS * COLS  # on 16 bytes: BLAS may add in another order elsewhere
    parameters, gradients = torch.randn(100), torch.randn(100)
    before = parameters.clone()
    weight = parameters[start:end].view(ROWS, COLS)
    alone, state = weight.clone(), optimizer.init_state(weight)
    other = optimizer.init_state(alone)
    for _ in range(3):
        gradient = gradients[start:end].view(ROWS, COLS)
        optimizer.update([item("weight", weight, gradient, state)])
        optimizer.update([item("weight", alone, gradient.clone(), other)])
        gradients = gradients.roll(11)
    assert torch.equal(weight, alone)
    assert torch.equal(parameters[:start], before[:start])
    assert torch.equal(parameters[end:], before[end:])


@ALL
def test_protocols_and_wrong_items(maker: Callable[[], MatrixRule]) -> None:
    optimizer = maker()
    assert isinstance(optimizer, OwnerOptimizer)
    assert isinstance(optimizer, MatrixOptimizer)
    assert not set(optimizer.piece_names) & set(optimizer.whole_names)
    weight = torch.zeros(ROWS, COLS)
    state = optimizer.init_state(weight)
    assert set(state) == set(optimizer.state_names)
    flat = torch.zeros(ROWS * COLS)
    with pytest.raises(ValueError, match=r"'w'.*\(70,\).*not a shard"):
        optimizer.update([item("w", flat, flat, state)])
    kind = type(optimizer).__name__
    for name in optimizer.state_names:
        lacking = {key: value for key, value in state.items() if key != name}
        with pytest.raises(ValueError, match=f"{kind} item 'w': state '{name}' is missing"):
            optimizer.update([item("w", weight, weight, lacking)])
        odd: dict[str, Any] = {**state, name: torch.zeros(3, 3, 3)}
        with pytest.raises(ValueError, match=f"{name}.* of shape \\(3, 3, 3\\)"):
            optimizer.update([item("w", weight, weight, odd)])
    if optimizer.whole_names:
        with pytest.raises(ValueError, match=r"'w'.*\(70,\) is not 2-D"):
            optimizer.directions([Whole("w", flat, state)])
        with pytest.raises(ValueError, match=f"'w': state '{optimizer.whole_names[0]}'"):
            optimizer.directions([Whole("w", weight, {})])
    assert not weight.any()


SCALES = {"zero": 0.0, "tiny": 1e-30, "huge": 1e20}
SHAPES = [(ROWS, COLS), (1, 9), (9, 1), (1, 1), (6, 6)]


@ALL
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("rank_one", [False, True])
def test_extreme_gradients_stay_finite(
    maker: Callable[[], MatrixRule], shape: tuple[int, int], scale: float, rank_one: bool
) -> None:
    """FP32, but for huge gradients in rules that square them (those raise, see their own tests)."""
    optimizer = maker()
    squares = not isinstance(optimizer, Muon | NorMuon)
    dtype = torch.float64 if squares and scale > 1.0 else torch.float32
    weight = torch.randn(shape, dtype=dtype)
    state = optimizer.init_state(weight)
    for _ in range(3):
        gradient = torch.randn(shape, dtype=dtype)
        if rank_one:
            gradient = gradient[:, :1] * gradient[:1]
        one = Item("weight", weight, gradient * scale, state, 0.02, 0.1, shape)
        optimizer.update([one])
        assert torch.isfinite(weight).all()
    assert all(torch.isfinite(value).all() for value in state.values())
