"""The single-process reference: a plain PyTorch loop over whole parameters.

Owns ``Training`` (what is trained, apart from how it lies on ranks), its data and initial weights,
and ``reference_run``: autograd on whole parameters, Newton-Schulz and the mixture of experts
written out, ``torch.optim.AdamW`` for what is no matrix.  Invariant: nothing of the runtimes, of
the collectives, of our linear functions or of our Muon and AdamW takes part, so an error there
cannot hide here.  Two things are shared on purpose: the model's other modules, which have tests
against ``transformers``, and, for NorMuon and Shampoo, their update of whole matrices, which has
tests against published formulas (``borrowed`` names them).  Tested by
``tests/tools/test_equivalence_tool.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from megamuon.arguments.config_model import ModelFlags
from megamuon.arguments.config_parallel import RecomputeFlags
from megamuon.models import GPT, PRESETS, gpt_config_from_flags
from megamuon.models import attention as attention_module
from megamuon.models import layers as layers_module
from megamuon.models.config import GPTConfig, RecomputeConfig
from megamuon.models.moe import MoEBlock
from megamuon.optim import Item, NorMuon, NorMuonConfig, Shampoo, ShampooConfig
from megamuon.optim.matrix_rule import MatrixRule
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
# Not SOAP: its first basis holds eigenvectors of equal eigenvalues, which are arbitrary, so that
# another order of summation is another run, in one process too.
OPTIMIZERS = ("muon", "adam", "normuon", "shampoo")
BORROWED = ("normuon", "shampoo")
# 2-D parameters that are no matrices to orthogonalise: tables, heads, routers, gates.
NO_MATRICES = ("embed", "lm_head", ".mlp.gate.", ".shared_expert_gate.")

Result = tuple[list[float], list[float], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and with what."""

    model: str = "nano"  # a preset
    optimizer: str = "muon"  # of matrices, one of OPTIMIZERS; AdamW trains the rest
    steps: int = 20
    accumulation: int = 1  # micro-batches of a step
    recompute: bool = False  # every layer again in the backward pass; the reference never does
    dtype: torch.dtype = torch.float64
    lr: float = 3e-3
    wd: float = 0.1
    clip: float = 1.0
    batch: int = 8  # samples of a step, over all ranks and micro-batches
    length: int = 16  # tokens of a sample
    places: int = 1  # parts of a micro-batch with a loss of their own: the data-parallel ranks
    seed: int = 7

    @property
    def borrowed(self) -> str | None:
        """The optimizer whose own single-process update the reference takes, if it does."""
        return self.optimizer if self.optimizer in BORROWED else None


def preset_flags(name: str) -> ModelFlags:
    """The model flags of a preset, dropout off.  Raises ValueError for a name that is none."""
    if name not in PRESETS:
        raise ValueError(f"--model {name}: no such preset; there are: {', '.join(PRESETS)}")
    known = {field.name for field in fields(ModelFlags)}
    values = {key: value for key, value in PRESETS[name].items() if key in known}
    return ModelFlags(**{**values, "hidden_dropout": 0.0, "attention_dropout": 0.0})


def model_config(name: str, *, recompute: bool = False) -> GPTConfig:
    """The decoder of a preset, without dropout."""
    flags = preset_flags(name)
    multiple = flags.make_vocab_size_divisible_by
    rows = -(-int(PRESETS[name]["vocab_size"]) // multiple) * multiple  # type: ignore[call-overload]
    config = gpt_config_from_flags(flags, padded_vocab_size=rows, recompute=RecomputeFlags())
    full = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    return replace(config, recompute=full) if recompute else config


def batch_of(step: int, training: Training) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step: (batch, length) each, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (training.batch, training.length + 1)
    vocabulary = int(PRESETS[training.model]["vocab_size"])  # type: ignore[call-overload]
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def place_of(part: Tensor, place: int, places: int) -> Tensor:
    """The rows of a micro-batch that one data-parallel rank sees."""
    return part[place * len(part) // places : (place + 1) * len(part) // places]


def build_reference(training: Training) -> GPT:
    """The model with whole parameters, filled as the runtimes fill theirs."""
    model = GPT(model_config(training.model)).to(training.dtype)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=training.dtype)
        generator = torch.Generator().manual_seed(parameter_seed(training.seed, name))
        model.initialise_(name, whole, generator)
        parameter.data.copy_(whole)
    return model


def is_matrix(name: str, parameter: Tensor) -> bool:
    """What a matrix optimizer trains: every 2-D weight but tables, heads, routers and gates."""
    return parameter.ndim == 2 and not any(part in name for part in NO_MATRICES)


# --- the model, where the runtimes have a hand in it ---------------------------------------------


def _linear(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> Tensor:
    given = [bias for bias in biases or () if bias is not None]
    bias = torch.cat(given) if given else None
    return functional.linear(inputs, torch.cat(tuple(weights)), bias)


@contextmanager
def _plain_linear_maps() -> Iterator[None]:
    """Let torch's own ``linear`` stand in for ours, whose backward writes into slots."""
    modules = (attention_module, layers_module)
    ours = [module.linear for module in modules]
    for module in modules:
        module.linear = _linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, function in zip(modules, ours, strict=True):
            module.linear = function


def _plain_experts(block: MoEBlock, routed: list[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A forward for ``block`` in which every expert computes every token and weighs it, by 0 where
    it was not chosen; router probabilities are appended to ``routed``.
    """
    config = block.config

    def forward(hidden: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert counted is None and config.capacity_factor is None  # no mask here, and no drops
        logits = functional.linear(hidden, block.gate.weight)
        probabilities = logits.softmax(-1)
        routed.append(probabilities.flatten(0, -2))
        weights, chosen = probabilities.topk(config.router_top_k, dim=-1)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(hidden)
        for index, expert in block.experts.named_children():
            weight = (weights * (chosen == int(index))).sum(-1, keepdim=True)
            total = total + weight * _gated(hidden, expert)
        if config.moe_shared_expert_size is not None:
            shared = _gated(hidden, block.shared_expert)
            if config.moe_shared_expert_gate:
                gate = functional.linear(hidden, block.shared_expert_gate.weight)
                shared = gate.sigmoid() * shared
            total = total + shared
        # The model's own statistics are not used.
        return total, hidden.new_zeros(2, probabilities.shape[-1])

    return forward


def _gated(hidden: Tensor, mlp: torch.nn.Module) -> Tensor:
    gate = functional.linear(hidden, mlp.gate_proj.weight)  # type: ignore[union-attr, arg-type]
    up = functional.linear(hidden, mlp.up_proj.weight)  # type: ignore[union-attr, arg-type]
    inner = functional.silu(gate) * up
    return functional.linear(inner, mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]


def balance(routed: Sequence[Tensor], config: GPTConfig) -> Tensor:
    """The load-balancing loss, without coefficient, from probabilities ``(tokens, experts)`` of
    each layer: ``transformers``' formula over the tokens of all layers, or Megatron's sum over
    layers.
    """
    pooled = [torch.cat(tuple(routed))] if config.aux_loss_scope == "model" else routed
    total = routed[0].new_zeros(())
    for probabilities in pooled:
        chosen = probabilities.topk(config.router_top_k, dim=-1).indices
        tokens = functional.one_hot(chosen, probabilities.shape[-1]).sum(1).to(probabilities.dtype)
        loss = probabilities.shape[-1] * (tokens.mean(0) * probabilities.mean(0)).sum()
        total = total + (loss if config.aux_loss_scope == "model" else loss / config.router_top_k)
    return total


# --- the optimizers ------------------------------------------------------------------------------


def textbook_newton_schulz(matrix: Tensor) -> Tensor:
    """Five quintic steps in the standard form, on the wide orientation."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    x = wide / wide.norm()
    for a, b, c in POLAR_EXPRESS:
        a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.t()


def _textbook_muon(training: Training, matrices: dict[str, Tensor]) -> Callable[[], None]:
    momenta = {name: torch.zeros_like(parameter) for name, parameter in matrices.items()}

    def step() -> None:
        for name, parameter in matrices.items():
            momenta[name].mul_(0.95).add_(parameter.grad)
            update = textbook_newton_schulz(parameter.grad + 0.95 * momenta[name])
            parameter.mul_(1 - training.lr * training.wd)
            parameter.add_(update, alpha=-training.lr * 0.2 * max(parameter.shape) ** 0.5)

    return step


def _borrowed_rule(training: Training, matrices: dict[str, Tensor]) -> Callable[[], None]:
    rules: dict[str, MatrixRule] = {
        "normuon": NorMuon(NorMuonConfig()),
        "shampoo": Shampoo(ShampooConfig()),
    }
    rule = rules[training.optimizer]
    state = {name: rule.init_state(parameter) for name, parameter in matrices.items()}

    def step() -> None:
        rule.update(
            [
                Item(
                    name=name,
                    parameter=parameter.data,
                    gradient=parameter.grad,
                    state=state[name],
                    lr=training.lr,
                    wd=training.wd,
                    logical_shape=tuple(parameter.shape),
                )
                for name, parameter in matrices.items()
            ]
        )

    return step


def _adamw(training: Training, rest: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": training.wd},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=training.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )


def reference_run(training: Training) -> Result:
    """Losses, gradient norms and final weights of the textbook loop.

    A loss is the mean cross entropy of its micro-batch; the load-balancing loss of a mixture of
    experts, of each micro-batch and data-parallel rank, is in the gradients only.
    """
    model = build_reference(training)
    routed: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, MoEBlock):
            module.forward = _plain_experts(module, routed)  # type: ignore[method-assign]
    named = dict(model.named_parameters())
    chosen = training.optimizer != "adam"
    matrices = {n: p for n, p in named.items() if chosen and is_matrix(n, p)}
    make = _borrowed_rule if training.borrowed else _textbook_muon
    update_matrices = make(training, matrices)  # type: ignore[arg-type]
    adamw = _adamw(training, [p for n, p in named.items() if n not in matrices])
    losses, norms = [], []
    for step in range(training.steps):
        total = 0.0
        for tokens, labels in _parts(step, training):
            routed.clear()
            with _plain_linear_maps():
                logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            count = training.accumulation * training.places
            total += loss.item() / count
            if routed:
                loss = loss + model.config.aux_loss_coefficient * balance(routed, model.config)
            (loss / count).backward()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), training.clip)))
        with torch.no_grad():
            update_matrices()
        adamw.step()
        for parameter in named.values():
            parameter.grad = None
    return losses, norms, {n: p.detach().clone() for n, p in named.items()}


def _parts(step: int, training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of every part of a step that has a loss of its own."""
    tokens, labels = (part.chunk(training.accumulation) for part in batch_of(step, training))
    for part, target in zip(tokens, labels, strict=True):
        for place in range(training.places):
            yield (
                place_of(part, place, training.places),
                place_of(target, place, training.places),
            )
