"""Pretrain a decoder: providers and a forward step for ``megamuon.training.pretrain``.

Start it alone, or on several ranks::

    torchrun --nproc-per-node 2 pretrain_gpt.py --model tiny --mock-data --tokenizer-type byte \\
        --seq-length 256 --micro-batch-size 4 --train-iters 100 --lr 1e-2

Tested by ``tests/training`` and ``tests/distributed/test_pretrain_*.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megamuon.console import run_script
from megamuon.models import GPT
from megamuon.models.gpt import kept_tokens
from megamuon.training import (
    build_datasets,
    data_identities,
    model_config,
    parse_command_line,
    pretrain,
    sample_text,
    tokenizer_of,
)


def loss_function(
    loss_mask: Tensor, losses: Tensor, balance: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the token losses (nats) that the mask keeps, their number, and the report of both.

    ``loss_mask`` and ``losses`` are ``(micro_batch, positions)``.  ``balance`` is the
    load-balancing loss of the pass: reported only, its gradient comes with the losses.
    """
    mask = loss_mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    report = {"lm loss": torch.stack([total.detach(), count])}
    if balance is not None:
        report["load_balancing_loss"] = balance.detach()
    return total, count, report


def forward_step(
    data_iterator: Iterator[Any], model: nn.Module, *, reset_positions: bool = False
) -> tuple[Tensor, Any]:
    """One micro-batch: token losses, and the function that sums them.

    Without ``reset_positions`` every sample has the positions 0, 1, 2, ..., which the model knows.
    """
    batch = next(data_iterator)
    mask = kept_tokens(batch["labels"], batch["loss_mask"])  # without what is labelled -100
    losses = model(
        batch["tokens"],
        position_ids=batch["position_ids"] if reset_positions else None,
        labels=batch["labels"],
        loss_mask=mask,  # routers count what has a loss
        document_ids=batch.get("document_ids"),  # with --reset-attention-mask
    )
    balance = getattr(model, "auxiliary_loss", None)  # of a mixture of experts
    return losses, partial(loss_function, mask, balance=balance)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit code."""
    parsed = parse_command_line(argv)
    config = parsed.config
    tokenizer = cache(partial(tokenizer_of, config))  # read once, and where errors are reported

    def model_provider(pre_process: bool = True, post_process: bool = True) -> nn.Module:
        return GPT(model_config(config, tokenizer()))

    def datasets_provider(samples: Sequence[int]) -> tuple[Any, Any, Any]:
        return build_datasets(config, tokenizer(), samples)

    def identity_provider(samples: Sequence[int]) -> dict[str, Any]:
        return data_identities(config, tokenizer(), samples)

    def at_end(model: nn.Module) -> str | None:
        return sample_text(config, tokenizer(), model)

    step = partial(forward_step, reset_positions=config.data.reset_position_ids)
    return pretrain(
        datasets_provider,
        model_provider,
        step,
        parsed=parsed,
        identity_provider=identity_provider,
        at_end=at_end,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
