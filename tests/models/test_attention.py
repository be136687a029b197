"""Attention backends, groups and masks against one explicit formula in FP64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamuon.models.attention import core_attention
from megamuon.models.config import ModelConfigError
from megamuon.models.gpt import document_mask


def heads(groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def draw(count: int) -> Tensor:
        shape = (2, 9, count, 16)  # as the model makes them: positions before heads
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).transpose(1, 2).detach().requires_grad_()

    return draw(6), draw(groups), draw(groups)


def plain(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """One head and one query at a time, keys that are not allowed left out of the sum."""
    times = query.shape[1] // key.shape[1]
    rows = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                seen = allowed[b, i].nonzero().squeeze(-1)
                scores = key[b, h // times, seen] @ query[b, h, i] / math.sqrt(query.shape[-1])
                rows.append(scores.softmax(-1) @ value[b, h // times, seen])
    return torch.stack(rows).view(query.shape)


@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize(
    ("backend", "masked"),
    [("auto", False), ("auto", True), ("flash", False), ("unfused", False), ("unfused", True)],
)
def test_values_and_gradients(backend: str, groups: int, masked: bool) -> None:
    query, key, value = heads(groups)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5] * 9])
    allowed = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    mask = None
    if masked:
        mask = document_mask(documents)
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
        assert torch.equal(mask[:, 0], allowed)
    expected = plain(query, key, value, allowed)
    expected_grads = torch.autograd.grad(expected.sin().sum(), (query, key, value))
    mine = core_attention(query, key, value, mask, backend=backend)
    grads = torch.autograd.grad(mine.sin().sum(), (query, key, value))
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-12)


def test_softmax_in_fp32_of_the_explicit_path() -> None:
    query, key, value = (part.detach().bfloat16() for part in heads(3))
    wide = core_attention(query, key, value, None, backend="unfused", softmax_in_fp32=True)
    narrow = core_attention(query, key, value, None, backend="local", softmax_in_fp32=False)
    exact = core_attention(query.double(), key.double(), value.double(), None, backend="unfused")
    assert wide.dtype == narrow.dtype == torch.bfloat16
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_dropout_follows_the_seed(backend: str) -> None:
    query, key, value = (part.detach() for part in heads(3, torch.float32))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return core_attention(query, key, value, None, backend=backend, dropout=0.5)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_flash_refuses_a_mask() -> None:
    query, key, value = heads(3)
    with pytest.raises(ValueError, match="attention_backend flash"):
        core_attention(query, key, value, torch.ones(1, 1, 9, 9).bool(), backend="flash")


def test_fused_needs_a_gpu() -> None:
    query, key, value = heads(3)
    with pytest.raises(ValueError, match="attention_backend fused"):
        core_attention(query, key, value, None, backend="fused")


def test_flash_with_dropout_has_no_kernel_on_a_cpu() -> None:
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ModelConfigError, match="flash has no kernel for torch.float32.*use auto"):
        core_attention(query, query, query, None, backend="flash", dropout=0.1)
