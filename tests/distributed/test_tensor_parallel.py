"""Models cut over tp ranks against the whole model in one process: losses, logits and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.models import GPT, GPTConfig, RecomputeConfig
from megamuon.placements import Axis, Partial, Shard
from megamuon.sharding import ShardingError, ShardingPlan, apply_sharding, plan_sharding
from tests.support.models import filled, gradients, tokens

LENGTH, BATCH = 12, 2
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 20,
    "ffn_hidden_size": 35,
    "num_attention_heads": 6,
    "num_query_groups": 3,
    "kv_channels": 4,
    "vocab_size": 67,
    "max_position_embeddings": 16,
}
MODELS: dict[str, GPTConfig] = {
    "nano": GPTConfig(**SMALL, add_qkv_bias=True),
    "gpt2": GPTConfig(
        **{**SMALL, "num_attention_heads": 5, "num_query_groups": 5},
        position_embedding="learned_absolute",
        normalization="LayerNorm",
        activation="gelu_tanh",
        add_bias_linear=True,
    ),
    "qwen3": GPTConfig(**SMALL, qk_layernorm=True, tied_embeddings=False),
    "shared-expert": GPTConfig(
        **SMALL,
        num_experts=5,
        router_top_k=2,
        moe_ffn_hidden_size=7,
        moe_shared_expert_size=9,
        moe_shared_expert_gate=True,
        aux_loss_coefficient=0.05,
    ),
    "capacity": GPTConfig(
        **SMALL,
        num_experts=4,
        router_top_k=2,
        moe_ffn_hidden_size=8,
        norm_topk_prob=True,
        aux_loss_coefficient=0.05,
        aux_loss_scope="layer",
        capacity_factor=0.8,
    ),
}
RECOMPUTE = {
    "kept": RecomputeConfig(),
    "full": RecomputeConfig(granularity="full", method="uniform", num_layers=1),
    "selective": RecomputeConfig(granularity="selective", modules=("core_attn", "mlp")),
}
CASES = [(m, s, r) for m in MODELS for s in (False, True) for r in RECOMPUTE]


def batch() -> dict[str, Tensor]:
    ids = tokens(BATCH, LENGTH)
    labels = ids.roll(-1, 1)
    labels[0, 3] = -100
    mask = torch.ones(BATCH, LENGTH)
    mask[1, 5] = 0
    documents = (torch.arange(LENGTH) >= 7).long().expand(BATCH, LENGTH)
    return {"tokens": ids, "labels": labels, "loss_mask": mask, "document_ids": documents}


def run(model: GPT) -> dict[str, Any]:
    """Losses and gradients of a weighted sum of them, and logits of a call without labels."""
    inputs = batch()
    losses = model(**inputs)
    weights = torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype).view_as(losses)
    (losses * weights).sum().backward()
    logits = model(inputs["tokens"])
    # The same backward again, through the logits: gradients add to those of the losses.
    (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).mean().backward()
    return {
        "losses": losses.detach(),
        "logits": logits.detach(),
        "gradients": gradients(model),
    }


def cut(config: GPTConfig, rank: int, world: int, sequence: bool) -> tuple[GPT, ShardingPlan]:
    model = filled(config, torch.float64, scale=2.0)
    plan = plan_sharding(model, tp=world, sequence_parallel=sequence)
    apply_sharding(model, plan, tp_rank=rank, group=dist.group.WORLD)
    return model, plan


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except (ShardingError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refused(rank: int, world: int) -> dict[str, str]:
    """What bad input is answered with, on this rank."""
    model, plan = cut(MODELS["nano"], rank, world, True)
    odd = torch.zeros(1, 5, dtype=torch.int64)
    answers = {"odd": message(lambda: model(odd))}
    answers["again"] = message(
        lambda: apply_sharding(model, plan, tp_rank=rank, group=dist.group.WORLD)
    )
    model, _ = cut(MODELS["nano"], rank, world, False)
    ids = tokens(1, 6)
    answers["token"] = message(lambda: model(ids.clone().fill_(67)))
    answers["label"] = message(lambda: model(ids, labels=ids.clone().fill_(67)))
    answers["negative"] = message(lambda: model(ids, labels=ids.clone().fill_(-1)))
    return answers


def with_dropout(rank: int, world: int) -> dict[str, Any]:
    """Losses, gradients and the place in the common stream of random numbers afterwards."""
    results = {}
    for sequence in (False, True):
        for name, recompute in RECOMPUTE.items():
            config = replace(
                MODELS["nano"], hidden_dropout=0.3, attention_dropout=0.3, recompute=recompute
            )
            model, _ = cut(config, rank, world, sequence)
            torch.manual_seed(11)
            results[sequence, name] = {**run(model), "next": torch.rand(())}
            results[sequence, name].pop("logits")
    return results


def narrow(rank: int, world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A step in a narrow dtype, in evaluation and training."""
    results = {}
    for sequence in (False, True):
        model, _ = cut(MODELS["shared-expert"], rank, world, sequence)
        model.to(dtype)
        result = run(model)
        with torch.no_grad():
            results[f"evaluation {sequence}"] = model.eval()(tokens(BATCH, LENGTH))
        results[f"losses {sequence}"] = result["losses"]
        results[f"gain {sequence}"] = result["gradients"]["model.layers.0.mlp.gate.weight"]
    return results


def work(rank: int, world: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        "refused": refused(rank, world),
        "dropout": with_dropout(rank, world),
        "bfloat16": narrow(rank, world, torch.bfloat16),
        "float32": narrow(rank, world, torch.float32),
    }
    for name, sequence, recompute in CASES:
        config = replace(MODELS[name], recompute=RECOMPUTE[recompute])
        model, _ = cut(config, rank, world, sequence)
        results[f"{name}, {sequence}, {recompute}"] = run(model)
    return results


@pytest.fixture(scope="module", params=[2, 3])
def ran(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    from tests.support.ranks import run_ranks

    return request.param, run_ranks(work, request.param, timeout=200.0)


@pytest.fixture(scope="module")
def wholes() -> dict[str, dict[str, Any]]:
    return {name: run(filled(c, torch.float64, scale=2.0)) for name, c in MODELS.items()}


def close(mine: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((mine - wanted).abs().max() <= tolerance * wanted.abs().max().clamp_min(1e-5))


def assembled(plan: ShardingPlan, name: str, pieces: list[Tensor]) -> Tensor:
    """The whole gradient: pieces side by side, partial ones summed, or the same on all ranks."""
    placement = plan.placements[name]
    cut = placement.compute.on(Axis.TP)
    if isinstance(cut, Shard):
        return torch.cat(pieces, dim=cut.dim)
    if placement.gradient.on(Axis.TP) == Partial():
        return torch.stack(pieces).sum(0)
    for other in pieces[1:]:
        assert close(other, pieces[0], 1e-12), f"{name} differs between ranks"
    return pieces[0]


@pytest.mark.parametrize(("name", "sequence", "recompute"), CASES)
def test_equals_the_whole_model(
    ran: tuple[int, list[dict[str, Any]]],
    wholes: dict[str, dict[str, Any]],
    name: str,
    sequence: bool,
    recompute: str,
) -> None:
    tp, by_rank = ran
    wanted = wholes[name]
    mine = [results[f"{name}, {sequence}, {recompute}"] for results in by_rank]
    for result in mine:
        assert torch.equal(result["losses"], mine[0]["losses"])
        assert close(result["losses"], wanted["losses"], 1e-12)
        assert close(result["logits"], wanted["logits"], 1e-12)
    plan = plan_sharding(GPT(MODELS[name]), tp=tp, sequence_parallel=sequence)
    for parameter, gradient in wanted["gradients"].items():
        whole = assembled(plan, parameter, [r["gradients"][parameter] for r in mine])
        assert whole.shape == gradient.shape
        assert close(whole, gradient, 1e-10), parameter


def test_bad_input_is_refused_on_every_rank(ran: tuple[int, list[dict[str, Any]]]) -> None:
    tp, by_rank = ran
    for results in by_rank:
        answers = results["refused"]
        assert f"5 positions does not divide by {tp} tensor-parallel ranks" in answers["odd"]
        assert "cut it once" in answers["again"]
        for case in ("token", "label", "negative"):
            assert "Error: index" in answers[case], answers


def test_dropout_is_the_same_where_activations_are(ran: tuple[int, list[dict[str, Any]]]) -> None:
    _, by_rank = ran
    for (sequence, name), first in by_rank[0]["dropout"].items():
        for results in by_rank[1:]:
            other = results["dropout"][sequence, name]
            assert torch.equal(other["losses"], first["losses"])
            assert torch.equal(other["next"], first["next"])
            if not sequence:  # a norm's gain meets the whole residual stream
                gain = "model.norm.weight"
                assert torch.equal(other["gradients"][gain], first["gradients"][gain])
    for results in by_rank:
        for sequence in (False, True):
            kept = results["dropout"][sequence, "kept"]
            for name in RECOMPUTE:
                again = results["dropout"][sequence, name]
                assert torch.equal(again["losses"], kept["losses"])
                for parameter, gradient in kept["gradients"].items():
                    assert close(again["gradients"][parameter], gradient, 1e-12), parameter


def test_narrow_dtypes(ran: tuple[int, list[dict[str, Any]]]) -> None:
    tp, by_rank = ran
    whole = run(filled(MODELS["shared-expert"], torch.float64, scale=2.0))
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.2)):
        for results in by_rank:
            for sequence in (False, True):
                losses = results[dtype][f"losses {sequence}"]
                logits = results[dtype][f"evaluation {sequence}"]
                assert losses.dtype == torch.float32
                assert torch.equal(losses, by_rank[0][dtype][f"losses {sequence}"])
                assert close(losses, whole["losses"], tolerance)
                assert logits.dtype == getattr(torch, dtype)
                assert torch.equal(logits, by_rank[0][dtype][f"evaluation {sequence}"])
        gains = [results[dtype]["gain False"] for results in by_rank]
        assert all(torch.equal(gain, gains[0]) for gain in gains), "the router drifts apart"
