"""The single-process oracle: a plain PyTorch loop with textbook Muon.

Owns ``reference_run``: autograd on whole parameters, Newton-Schulz written out,
``torch.optim.AdamW`` for the rest. Nothing of the owner runtime, of its optimizers or of its linear
function is used, so an error there cannot hide here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megamuon.models.config import GPTConfig, RecomputeConfig
from megamuon.models.gpt import GPT
from megamuon.runtime.shard import parameter_seed

# Polar Express with every polynomial scaled by 1.05, as the specification prints it to six digits.
SAFETY = 1.05
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run of ``nano``."""

    steps: int = 50
    accumulation: int = 1
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    lr: float = 3e-3
    wd: float = 0.1
    clip: float = 1.0
    batch: int = (
        24  # samples per step over all ranks: divides by 1..4 ranks times 1 or 2 micro-batches
    )
    length: int = 16


def nano_config(recompute: bool = False) -> GPTConfig:
    """The ``nano`` preset: GQA, query/key/value biases, a tied head and odd sizes."""
    return GPTConfig(
        num_layers=3,
        hidden_size=50,
        ffn_hidden_size=87,
        num_attention_heads=6,
        num_query_groups=3,
        kv_channels=10,
        vocab_size=257,
        max_position_embeddings=64,
        norm_epsilon=1e-6,
        add_qkv_bias=True,
        tied_embeddings=True,
        recompute=RecomputeConfig(granularity="full", method="uniform", num_layers=1)
        if recompute
        else RecomputeConfig(),
    )


def batch_of(step: int, case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step: (batch, length) each, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 257, (case.batch, case.length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def textbook_newton_schulz(matrix: Tensor) -> Tensor:
    """Five quintic steps in the standard form, on the wide orientation."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    x = wide / wide.norm()
    for a, b, c in POLAR_EXPRESS:
        a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.t()


def build_reference(case: Case) -> GPT:
    """The model with whole parameters, filled as ``shard`` fills its owners."""
    model = GPT(nano_config(case.recompute)).to(case.dtype)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=case.dtype)
        model.initialise_(name, whole, torch.Generator().manual_seed(parameter_seed(SEED, name)))
        parameter.data.copy_(whole)
    return model


def is_matrix(name: str, parameter: Tensor) -> bool:
    """What the reference trains with Muon: every 2-D weight but the token table."""
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def reference_run(case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of the textbook loop."""
    model = build_reference(case)
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if is_matrix(n, p)}
    momenta = {n: torch.zeros_like(p) for n, p in matrices.items()}
    rest = [p for n, p in named.items() if n not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": case.wd},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=case.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for step in range(case.steps):
        tokens, labels = batch_of(step, case)
        total = 0.0
        for part, target in zip(
            tokens.chunk(case.accumulation), labels.chunk(case.accumulation), strict=True
        ):
            logits = model(part)
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            (loss / case.accumulation).backward()
            total += loss.item() / case.accumulation
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), case.clip)))
        with torch.no_grad():
            for name, parameter in matrices.items():
                momenta[name].mul_(0.95).add_(parameter.grad)
                update = textbook_newton_schulz(parameter.grad + 0.95 * momenta[name])
                parameter.mul_(1 - case.lr * case.wd)
                parameter.add_(update, alpha=-case.lr * 0.2 * max(parameter.shape) ** 0.5)
        adamw.step()
        for parameter in named.values():
            parameter.grad = None
    return losses, norms, {n: p.detach().clone() for n, p in named.items()}
