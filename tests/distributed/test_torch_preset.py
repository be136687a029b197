"""The ``torch`` preset through the whole runtime: bit for bit ``torch.optim.Muon`` on one rank."""

from __future__ import annotations

import pytest
import torch

from megamuon.models.gpt import GPT
from megamuon.optim.adamw import AdamWConfig
from megamuon.optim.muon import MuonConfig
from megamuon.runtime import OptimizerSettings, shard
from tests.support.reference import SEED, Case, batch_of, build_reference, is_matrix, nano_config
from tests.support.runtime_config import plain_config

CASE = Case(steps=4, dtype=torch.float32)


def owner_weights(stage: int) -> dict[str, torch.Tensor]:
    """Weights after a few steps on the owner runtime."""
    with torch.device("meta"):
        model = GPT(nano_config())
    runtime = shard(
        model,
        layers=GPT.layer_classes,
        initial=model.initialise_,
        config=plain_config(
            zero_stage=stage,
            unit_threshold=2_000,
            seed=SEED,
            optimizer=OptimizerSettings(
                clip=0.0,
                matrix=MuonConfig.torch_preset(),
                rest=AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8),
            ),
        ),
    )
    for step in range(CASE.steps):
        tokens, labels = batch_of(step, CASE)
        model(tokens, labels=labels).mean().backward()
        runtime.step(CASE.lr, CASE.wd)
    return dict(runtime.full_parameters())


def torch_weights() -> dict[str, torch.Tensor]:
    """The same steps with torch's own optimizers on whole parameters."""
    model = build_reference(CASE)
    named = dict(model.named_parameters())
    muon = torch.optim.Muon(
        [p for n, p in named.items() if is_matrix(n, p)], lr=CASE.lr, weight_decay=CASE.wd
    )
    rest = [p for n, p in named.items() if not is_matrix(n, p)]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": CASE.wd},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=CASE.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(CASE.steps):
        tokens, labels = batch_of(step, CASE)
        model(tokens, labels=labels).mean().backward()
        muon.step()
        adamw.step()
        model.zero_grad()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_bit_for_bit(stage: int) -> None:
    ours, theirs = owner_weights(stage), torch_weights()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
