"""``grouped_linear`` against one plain product per expert, its two backends, and its slots."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.kernels.grouped import GroupedBackendError, grouped_linear, stacked
from megamuon.kernels.linear import UNSHARDED, UnshardedGradient

ROWS = (6, 2)  # members of an expert's block: multiples of 16 bytes in FP32 when stacked
COLUMNS = 4
COUNTS = (3, 0, 4, 1)  # the second expert gets nothing
SETTINGS = [("loop", torch.float64), ("loop", torch.float32), ("grouped", torch.float32)]


def make(dtype: torch.dtype, *, together: bool) -> list[nn.Parameter]:
    """Two members for each of four experts, in one storage or in storages of their own."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(len(COUNTS) * sum(ROWS), COLUMNS, generator=generator).to(dtype)
    parts = whole.split(ROWS * len(COUNTS))
    return [nn.Parameter(part if together else part.clone()) for part in parts]


def inputs(dtype: torch.dtype, rest: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(sum(COUNTS) + rest, COLUMNS, generator=generator)
    return drawn.to(dtype).requires_grad_()


def slots_for(weights: list[nn.Parameter], *, together: bool) -> list[UnshardedGradient]:
    whole = torch.full((sum(w.numel() for w in weights),), float("nan"), dtype=weights[0].dtype)
    slots = []
    for weight, part in zip(weights, whole.split([w.numel() for w in weights]), strict=True):
        view = part.view(weight.shape)
        slots.append(
            UnshardedGradient(view if together else view.clone(), lambda: None, lambda: None)
        )
        setattr(weight, UNSHARDED, slots[-1])
    return slots


def reference(dtype: torch.dtype, rest: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, input gradient and weight gradients of one ``F.linear`` per expert."""
    x, weights = inputs(dtype, rest), make(dtype, together=False)
    parts = x.split([*COUNTS, rest])
    outputs = [
        functional.linear(part, torch.cat(weights[2 * i : 2 * i + 2]))
        for i, part in enumerate(parts[: len(COUNTS)])
    ]
    output = torch.cat([*outputs, x.new_zeros(rest, sum(ROWS))])
    grads = torch.autograd.grad(output.sin().sum(), [x, *weights])
    return output, grads[0], list(grads[1:])


def close(mine: Tensor | None, expected: Tensor) -> None:
    assert mine is not None
    narrow = mine.dtype is not torch.float64
    torch.testing.assert_close(mine, expected, rtol=1e-5 if narrow else 0, atol=1e-5)


@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("backend", "dtype"), SETTINGS)
def test_without_slots(backend: str, dtype: torch.dtype, together: bool, rest: int) -> None:
    output, to_inputs, to_weights = reference(dtype, rest)
    weights, x = make(dtype, together=together), inputs(dtype, rest)
    mine = grouped_linear(x, weights, torch.tensor(COUNTS), backend=backend, rest=rest > 0)
    mine.sin().sum().backward()
    close(mine, output)
    close(x.grad, to_inputs)
    for weight, expected in zip(weights, to_weights, strict=True):
        close(weight.grad, expected)
    if rest:
        assert mine[-rest:].abs().max() == 0
        assert x.grad is not None
        assert x.grad[-rest:].abs().max() == 0


@pytest.mark.parametrize("rest", [0, 2])
def test_gradcheck(rest: int) -> None:
    weights = make(torch.float64, together=True)
    assert torch.autograd.gradcheck(
        lambda x, *w: grouped_linear(x, w, torch.tensor(COUNTS), rest=rest > 0),
        (inputs(torch.float64, rest), *weights),
    )


@pytest.mark.parametrize(
    ("weights_together", "slots_together"), list(product((True, False), repeat=2))
)
@pytest.mark.parametrize(("backend", "dtype"), SETTINGS)
def test_slots_store_first_and_accumulate_after(
    backend: str, dtype: torch.dtype, weights_together: bool, slots_together: bool
) -> None:
    _, to_inputs, to_weights = reference(dtype)
    weights = make(dtype, together=weights_together)
    slots = slots_for(weights, together=slots_together)
    for count in (1, 2):
        x = inputs(dtype)
        output = grouped_linear(x, weights, torch.tensor(COUNTS), backend=backend)
        output.sin().sum().backward()
        close(x.grad, to_inputs)
        # The slots held NaN, those of the expert without tokens too.
        for slot, expected in zip(slots, to_weights, strict=True):
            assert slot.written
            close(slot.gradient, count * expected)
    assert slots[2].gradient.abs().max() == 0
    assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize(("backend", "dtype"), SETTINGS)
def test_members_in_different_states(backend: str, dtype: torch.dtype) -> None:
    """A frozen member, one without a slot and one that holds a gradient already."""
    _, to_inputs, to_weights = reference(dtype)
    weights = make(dtype, together=True)
    slots = slots_for(weights, together=True)
    weights[0].requires_grad_(False)
    delattr(weights[3], UNSHARDED)
    slots[5].written = True
    slots[5].gradient.fill_(10.0)
    x = inputs(dtype)
    grouped_linear(x, weights, torch.tensor(COUNTS), backend=backend).sin().sum().backward()
    close(x.grad, to_inputs)
    assert not slots[0].written
    assert weights[0].grad is None
    close(weights[3].grad, to_weights[3])
    close(slots[5].gradient, 10 + to_weights[5])
    for index in (1, 2, 4, 6, 7):
        close(slots[index].gradient, to_weights[index])


@pytest.mark.parametrize(("backend", "dtype"), SETTINGS)
def test_no_rows_at_all_still_write_zeros(backend: str, dtype: torch.dtype) -> None:
    weights = make(dtype, together=True)
    slots = slots_for(weights, together=True)
    x = inputs(dtype)[:0].detach().requires_grad_()
    output = grouped_linear(x, weights, torch.zeros(4, dtype=torch.int64), backend=backend)
    output.sum().backward()
    assert output.shape == (0, sum(ROWS))
    assert all(slot.written and slot.gradient.abs().max() == 0 for slot in slots)


@pytest.mark.parametrize(("backend", "dtype"), SETTINGS)
def test_backward_asks_for_weights_before_reading_them(backend: str, dtype: torch.dtype) -> None:
    _, to_inputs, _ = reference(dtype)
    weights = make(dtype, together=True)
    kept = [weight.detach().clone() for weight in weights]

    def refill() -> None:
        for weight, values in zip(weights, kept, strict=True):
            weight.data.copy_(values)

    x = inputs(dtype)
    output = grouped_linear(x, weights, torch.tensor(COUNTS), backend=backend).sin().sum()
    for weight in weights:
        setattr(
            weight, UNSHARDED, UnshardedGradient(torch.empty_like(weight), refill, lambda: None)
        )
        weight.data.fill_(float("nan"))
    output.backward()
    close(x.grad, to_inputs)


def test_backends_agree_in_bf16() -> None:
    results = []
    for backend in ("grouped", "loop"):
        weights = make(torch.bfloat16, together=True)
        doubled = [nn.Parameter(torch.cat([w.detach()] * 2, 1)) for w in weights]  # 16 bytes
        x = torch.cat([inputs(torch.bfloat16).detach()] * 2, 1).requires_grad_()
        output = grouped_linear(x, doubled, torch.tensor(COUNTS), backend=backend)
        output.sum().backward()
        results.append([output.detach(), x.grad, *(w.grad for w in doubled)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2)


def test_stacked_is_a_view_where_all_lie_together() -> None:
    weights = make(torch.float32, together=True)
    blocks = [weights[i : i + 2] for i in range(0, 8, 2)]
    view = stacked(blocks)
    assert view.shape == (4, sum(ROWS), COLUMNS)
    assert view.data_ptr() == weights[0].data_ptr()
    apart = make(torch.float32, together=False)
    copy = stacked([apart[i : i + 2] for i in range(0, 8, 2)])
    assert torch.equal(copy, view)


def test_what_is_refused() -> None:
    counts, weights = torch.tensor(COUNTS), make(torch.float32, together=True)
    with pytest.raises(ValueError, match="7 weights for 4 experts"):
        grouped_linear(inputs(torch.float32), weights[:7], counts)
    with pytest.raises(ValueError, match="'fast': choose from auto, grouped, loop"):
        grouped_linear(inputs(torch.float32), weights, counts, backend="fast")
    double = make(torch.float64, together=True)
    with pytest.raises(GroupedBackendError, match=r"float64; use auto or loop"):
        grouped_linear(inputs(torch.float64), double, counts, backend="grouped")
    odd = [nn.Parameter(weight.detach()[:, :3].contiguous()) for weight in weights]
    with pytest.raises(GroupedBackendError, match="row of 3 .* no multiple of 16 bytes"):
        grouped_linear(inputs(torch.float32)[:, :3], odd, counts, backend="grouped")
    narrow = inputs(torch.float32)[:, :3]
    assert grouped_linear(narrow, odd, counts, backend="auto").shape == (8, sum(ROWS))
