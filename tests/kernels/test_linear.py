"""``linear`` against ``F.linear`` on the whole weight, and what it does with gradient slots."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.kernels.linear import UNSHARDED, UnshardedGradient, adjacent, fused, linear

ROWS = (6, 4, 2)
COLUMNS = 5


def block(*, bias: bool, together: bool) -> tuple[list[nn.Parameter], list[nn.Parameter | None]]:
    """Members of a fusion block, in one storage or in storages of their own."""
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int) -> list[nn.Parameter]:
        whole = torch.randn(sum(ROWS), *shape, generator=generator, dtype=torch.float64)
        parts = whole.split(ROWS)
        return [nn.Parameter(part if together else part.clone()) for part in parts]

    return make(COLUMNS), make() if bias else [None] * len(ROWS)


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, 3, COLUMNS, generator=generator, dtype=torch.float64).requires_grad_()


def reference(
    weights: list[nn.Parameter], biases: list[nn.Parameter | None]
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Output, input gradient, weight gradients and bias gradients of plain torch."""
    x = inputs()
    bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
    output = functional.linear(x, torch.cat(list(weights)), bias)
    wanted = [x, *weights, *(b for b in biases if b is not None)]
    grads = torch.autograd.grad(output.sin().sum(), wanted)
    return output, grads[0], list(grads[1 : 1 + len(weights)]), list(grads[1 + len(weights) :])


class Recorder:
    """Slots for some parameters; counts the calls that a runtime would get."""

    def __init__(self, parameters: list[nn.Parameter], *, together: bool) -> None:
        shapes = [p.shape for p in parameters]
        whole = torch.full((sum(s.numel() for s in shapes),), float("nan"), dtype=torch.float64)
        self.gathers = self.wakes = 0
        self.slots = []
        place = 0
        for parameter, shape in zip(parameters, shapes, strict=True):
            view = whole[place : place + shape.numel()].view(shape)
            place += shape.numel()
            slot = UnshardedGradient(view if together else view.clone(), self.gather, self.wake)
            setattr(parameter, UNSHARDED, slot)
            self.slots.append(slot)

    def gather(self) -> None:
        self.gathers += 1

    def wake(self) -> None:
        self.wakes += 1


@pytest.mark.parametrize(("bias", "together"), list(product((True, False), repeat=2)))
def test_equals_plain_linear_without_slots(bias: bool, together: bool) -> None:
    weights, biases = block(bias=bias, together=together)
    output, to_inputs, to_weights, to_biases = reference(weights, biases)
    x = inputs()
    mine = linear(x, weights, biases)
    mine.sin().sum().backward()
    torch.testing.assert_close(mine, output, rtol=0, atol=1e-13)
    torch.testing.assert_close(x.grad, to_inputs, rtol=0, atol=1e-13)
    for parameter, expected in zip(weights, to_weights, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13)
    for parameter, expected in zip([b for b in biases if b is not None], to_biases, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13)


def test_single_weight_matches_functional_bitwise_in_fp32() -> None:
    weight, bias = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(7))
    x = torch.randn(4, 5)
    assert torch.equal(linear(x, (weight,), (bias,)), functional.linear(x, weight, bias))
    assert torch.equal(linear(x, (weight,)), functional.linear(x, weight))


def test_gradcheck() -> None:
    weights, biases = block(bias=True, together=True)
    assert torch.autograd.gradcheck(
        lambda x, *p: linear(x, p[:3], p[3:]), (inputs(), *weights, *biases)
    )


@pytest.mark.parametrize(
    ("weights_together", "slots_together"), list(product((True, False), repeat=2))
)
def test_slots_store_first_and_accumulate_after(
    weights_together: bool, slots_together: bool
) -> None:
    weights, biases = block(bias=True, together=weights_together)
    _, to_inputs, to_weights, to_biases = reference(weights, biases)
    mine = Recorder(weights, together=slots_together)
    vectors = Recorder([b for b in biases if b is not None], together=slots_together)
    for count in (1, 2, 3):
        x = inputs()
        linear(x, weights, biases).sin().sum().backward()
        torch.testing.assert_close(x.grad, to_inputs, rtol=0, atol=1e-13)
        # The slots held NaN: only a store, not an addition, makes the first result finite.
        for slot, expected in zip(mine.slots + vectors.slots, to_weights + to_biases, strict=True):
            assert slot.written
            torch.testing.assert_close(slot.gradient, count * expected, rtol=0, atol=1e-12)
    assert all(p.grad is None for p in [*weights, *biases])
    assert mine.gathers >= 3
    assert mine.wakes >= 3


def test_a_new_micro_batch_stores_again() -> None:
    weights, biases = block(bias=False, together=True)
    _, _, to_weights, _ = reference(weights, biases)
    mine = Recorder(weights, together=True)
    for _ in range(2):
        for slot in mine.slots:
            slot.written = False
        linear(inputs(), weights, biases).sin().sum().backward()
    for slot, expected in zip(mine.slots, to_weights, strict=True):
        torch.testing.assert_close(slot.gradient, expected, rtol=0, atol=1e-13)


def test_members_in_different_states_are_handled_one_by_one() -> None:
    weights, biases = block(bias=False, together=True)
    _, _, to_weights, _ = reference(weights, biases)
    mine = Recorder(weights, together=True)
    mine.slots[1].written = True
    mine.slots[1].gradient.fill_(10.0)
    linear(inputs(), weights, biases).sin().sum().backward()
    torch.testing.assert_close(mine.slots[0].gradient, to_weights[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(mine.slots[1].gradient, 10 + to_weights[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(mine.slots[2].gradient, to_weights[2], rtol=0, atol=1e-13)


@pytest.mark.parametrize("with_slots", [True, False])
def test_frozen_members_get_nothing(with_slots: bool) -> None:
    weights, biases = block(bias=True, together=True)
    _, _, to_weights, to_biases = reference(weights, biases)
    weights[1].requires_grad_(False)
    biases[0].requires_grad_(False)  # type: ignore[union-attr]
    mine = Recorder(weights, together=True) if with_slots else None
    x = inputs()
    linear(x, weights, biases).sin().sum().backward()
    assert weights[1].grad is None
    assert biases[0].grad is None  # type: ignore[union-attr]
    torch.testing.assert_close(biases[2].grad, to_biases[2], rtol=0, atol=1e-13)  # type: ignore[union-attr]
    for index in (0, 2):
        got = mine.slots[index].gradient if mine else weights[index].grad
        torch.testing.assert_close(got, to_weights[index], rtol=0, atol=1e-13)
    if mine:
        assert not mine.slots[1].written
        assert mine.slots[1].gradient.isnan().all()


def test_frozen_weights_still_pass_the_gradient_on() -> None:
    weights, biases = block(bias=False, together=True)
    _, to_inputs, _, _ = reference(weights, biases)
    for weight in weights:
        weight.requires_grad_(False)
    x = inputs()
    linear(x, weights, biases).sin().sum().backward()
    torch.testing.assert_close(x.grad, to_inputs, rtol=0, atol=1e-13)


def test_inputs_without_gradient_cost_no_product() -> None:
    weights, biases = block(bias=False, together=True)
    x = inputs().detach()
    linear(x, weights, biases).sum().backward()
    assert x.grad is None
    assert weights[0].grad is not None


def test_backward_asks_for_weights_before_reading_them() -> None:
    """A released group: the weights hold NaN until ``ensure_weights`` brings them back."""
    weights, biases = block(bias=False, together=True)
    _, to_inputs, _, _ = reference(weights, biases)
    kept = [weight.detach().clone() for weight in weights]

    def refill() -> None:
        for weight, values in zip(weights, kept, strict=True):
            weight.data.copy_(values)

    x = inputs()
    output = linear(x, weights, biases).sin().sum()
    for weight in weights:
        setattr(
            weight, UNSHARDED, UnshardedGradient(torch.empty_like(weight), refill, lambda: None)
        )
        weight.data.fill_(float("nan"))
    output.backward()
    torch.testing.assert_close(x.grad, to_inputs, rtol=0, atol=1e-13)


def test_fused_is_a_view_where_members_are_adjacent() -> None:
    weights, _ = block(bias=False, together=True)
    view = fused(weights)
    assert adjacent(weights)
    assert view.data_ptr() == weights[0].data_ptr()
    assert view.shape == (sum(ROWS), COLUMNS)
    apart, _ = block(bias=False, together=False)
    assert not adjacent(apart)
    assert torch.equal(fused(apart), view)
    swapped = [weights[1], weights[0]]
    assert not adjacent(swapped)
    assert torch.equal(fused(swapped), torch.cat([weights[1], weights[0]]))


def test_mixed_biases_are_refused() -> None:
    weights, biases = block(bias=True, together=True)
    with pytest.raises(ValueError, match="all of its members or on none"):
        linear(inputs(), weights, [biases[0], None, biases[2]])
