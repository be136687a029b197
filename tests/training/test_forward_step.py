"""The forward step of ``pretrain_gpt.py``: what has no loss weighs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megamuon.models import GPT
from megamuon.training.reports import micro_batch_loss
from tests.support.models import gradients
from tools.reference_training import Training, build_reference


def batch(mask: Tensor, *, labelled: bool) -> dict[str, Tensor]:
    """Tokens left out by their labels or by the mask."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 256, (mask.shape[0], mask.shape[1] + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    return {
        "tokens": tokens[:, :-1],
        "labels": labels.masked_fill(mask == 0, -100) if labelled else labels,
        "loss_mask": torch.ones_like(mask) if labelled else mask,
    }


def passed(model: GPT, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    losses, loss_function = pretrain_gpt.forward_step(iter([inputs]), model)
    loss, report = micro_batch_loss(loss_function(losses))
    loss.backward()
    return loss.detach(), dict(report)


@pytest.mark.parametrize("name", ["nano", "nano-moe"])
@pytest.mark.parametrize("kept", [0, 7, 16])
def test_labels_of_no_loss_are_as_a_mask_of_0(name: str, kept: int) -> None:
    mask = torch.zeros(1, 16)
    mask[0, torch.randperm(16)[:kept]] = 1
    results = []
    for labelled in (False, True):
        model = build_reference(Training(model=name))
        results.append((*passed(model, batch(mask, labelled=labelled)), gradients(model)))
    (one, report, expected), (two, again, found) = results
    assert torch.equal(one, two)
    assert report["lm loss"].tolist() == again["lm loss"].tolist()
    assert report["lm loss"][1] == kept
    assert ("load_balancing_loss" in report) == (name == "nano-moe")
    assert all(torch.equal(report[key], again[key]) for key in report)
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter
    assert any(bool(gradient.any()) for gradient in found.values()) == (kept > 0)
