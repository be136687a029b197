"""AdamW and SGD against torch's own, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megamuon.optim.adamw import AdamW, AdamWConfig, Sgd, SgdConfig
from megamuon.optim.optimizer import Item, OwnerOptimizer

SHAPES = ((7,), (5, 9), (2, 3, 4), ())
RATES = ((1e-3, 0.1), (3e-3, 0.0), (1e-3, 0.0), (2e-3, 0.5))


def items(
    parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]]
) -> list[Item]:
    return [
        Item(str(index), p, g, s, lr, wd, tuple(p.shape))
        for index, (p, g, s, (lr, wd)) in enumerate(
            zip(parameters, gradients, states, RATES, strict=True)
        )
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torch_adamw_bit_for_bit(dtype: torch.dtype, fused: bool) -> None:
    theirs = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    ours = [parameter.detach().clone() for parameter in theirs]
    reference = torch.optim.AdamW(
        [
            {"params": [p], "lr": lr, "weight_decay": wd}
            for p, (lr, wd) in zip(theirs, RATES, strict=True)
        ],
        betas=(0.9, 0.95),
        eps=1e-7,
        fused=fused,
    )
    optimizer = AdamW(AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-7, fused=fused))
    states = [optimizer.init_state(parameter) for parameter in ours]
    for _ in range(6):
        gradients = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        optimizer.update(items(ours, gradients, states))
    for one, two, state in zip(ours, theirs, states, strict=True):
        assert torch.equal(one, two)
        for name in optimizer.state_names:
            assert torch.equal(state[name], reference.state[two][name])
        assert state["exp_avg"].dtype == dtype
        assert state["step"].dtype == torch.float32
        assert state["step"].shape == ()


def test_many_small_and_one_large_take_the_same_bits() -> None:
    """Small tensors go through torch's multi-tensor path, large ones do not."""
    sizes = [(3,)] * 20 + [(40_000,), (40_000,)]
    theirs = [nn.Parameter(torch.randn(size)) for size in sizes]
    together = [parameter.detach().clone() for parameter in theirs]
    alone = [parameter.detach().clone() for parameter in theirs]
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    optimizer = AdamW(AdamWConfig())
    states = [[optimizer.init_state(p) for p in together] for _ in range(2)]
    for _ in range(3):
        gradients = [torch.randn(size) for size in sizes]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        batches = [
            [
                Item("w", p, g, s, 1e-2, 0.1, tuple(p.shape))
                for p, g, s in zip(parameters, gradients, state, strict=True)
            ]
            for parameters, state in ((together, states[0]), (alone, states[1]))
        ]
        for start, stop in ((0, 20), (20, 22)):
            optimizer.update(batches[0][start:stop])
        for one in batches[1]:
            optimizer.update([one])
    for one, two, three in zip(together, alone, theirs, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_slices_give_the_slices_of_the_whole() -> None:
    whole, gradient = torch.randn(6, 11), torch.randn(6, 11)
    buffer, gradients = whole.flatten().clone(), gradient.flatten()
    optimizer = AdamW(AdamWConfig())
    parts = [slice(0, 22), slice(22, 61), slice(61, 66)]
    state = optimizer.init_state(whole)
    part_states = [optimizer.init_state(buffer[part]) for part in parts]
    for _ in range(3):
        optimizer.update([Item("w", whole, gradient, state, 1e-2, 0.1, (6, 11))])
        optimizer.update(
            [
                Item("w", buffer[part], gradients[part], part_state, 1e-2, 0.1, (6, 11))
                for part, part_state in zip(parts, part_states, strict=True)
            ]
        )
    torch.testing.assert_close(buffer.view(6, 11), whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_is_torch_sgd_bit_for_bit(momentum: float) -> None:
    theirs = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    ours = [parameter.detach().clone() for parameter in theirs]
    reference = torch.optim.SGD(
        [
            {"params": [p], "lr": lr, "weight_decay": wd}
            for p, (lr, wd) in zip(theirs, RATES, strict=True)
        ],
        momentum=momentum,
    )
    optimizer = Sgd(SgdConfig(momentum=momentum))
    states = [optimizer.init_state(parameter) for parameter in ours]
    for _ in range(5):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        optimizer.update(items(ours, gradients, states))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)
    assert optimizer.state_names == (("momentum_buffer",) if momentum else ())


@pytest.mark.parametrize("make", [lambda: AdamW(AdamWConfig()), lambda: Sgd(SgdConfig())])
def test_each_item_is_told_once_after_its_change(make: Callable[[], AdamW | Sgd]) -> None:
    optimizer = make()
    weights = [torch.randn(shape) for shape in SHAPES]
    states = [optimizer.init_state(weight) for weight in weights]
    seen: dict[str, Tensor] = {}

    def updated(done: Item) -> None:
        assert done.name not in seen
        seen[done.name] = done.parameter.clone()

    optimizer.update(items(weights, [torch.randn(shape) for shape in SHAPES], states), updated)
    assert sorted(seen) == [str(index) for index in range(len(SHAPES))]
    for name, value in seen.items():
        assert torch.equal(value, weights[int(name)])


def test_protocol_and_errors() -> None:
    assert isinstance(AdamW(AdamWConfig()), OwnerOptimizer)
    assert isinstance(Sgd(SgdConfig()), OwnerOptimizer)
    weight = torch.zeros(3)
    with pytest.raises(ValueError, match="'w'.*exp_avg_sq, step"):
        state = {"exp_avg": torch.zeros(3)}
        AdamW(AdamWConfig()).update([Item("w", weight, weight.clone(), state, 1e-3, 0.0, (3,))])
    with pytest.raises(ValueError, match="beta2 = 1.0"):
        AdamWConfig(beta2=1.0)
    with pytest.raises(ValueError, match="eps = -1"):
        AdamWConfig(eps=-1.0)
    with pytest.raises(ValueError, match="momentum = 1.5"):
        SgdConfig(momentum=1.5)
