"""The layers with experts: names, routing, capacity, auxiliary loss, recompute, fused views."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamuon.kernels.grouped import stacked
from megamuon.matrices import Kind, LogicalParameter, Route, collect
from megamuon.models import GPT, GPTConfig, ModelConfigError, RecomputeConfig
from megamuon.models.moe import (
    MoEBlock,
    Router,
    auxiliary_loss,
    balancing_loss,
    with_auxiliary_gradient,
)
from tests.support.models import filled, gradients, named_generator, small_config, tokens

MOE: dict[str, object] = {
    "num_experts": 5,
    "router_top_k": 2,
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_size": 28,
    "moe_shared_expert_gate": True,
    "aux_loss_coefficient": 0.2,
}


def moe_config(**changes: object) -> GPTConfig:
    return small_config(**{**MOE, **changes})


def parameters(config: GPTConfig) -> tuple[LogicalParameter, ...]:
    with torch.device("meta"):
        return collect(GPT(config), layers=GPT.layer_classes)


def block_and_input(**changes: object) -> tuple[MoEBlock, Tensor]:
    block = MoEBlock(moe_config(**changes)).double()
    for name, parameter in block.named_parameters():
        drawn = torch.randn(parameter.shape, generator=named_generator(name))
        parameter.data.copy_(drawn.mul_(0.3))
    hidden = torch.randn(2, 9, 48, generator=named_generator("hidden"), dtype=torch.float64)
    return block, hidden.requires_grad_()


def kept_choices(weights: Tensor, indices: Tensor, config: GPTConfig) -> Tensor:
    """Plain statement of capacity over ``(tokens, k)``: sort each expert's tokens, cut the list."""
    kept = torch.ones_like(indices, dtype=torch.bool)
    if config.capacity_factor is None:
        return kept
    experts = config.num_experts or 0
    room = math.ceil(indices.numel() / experts * config.capacity_factor)
    for expert in range(experts):
        places = [tuple(place) for place in (indices == expert).nonzero().tolist()]
        if config.drop_policy == "probs":
            places.sort(key=lambda place: -weights[place].item())
        for place in places[room:]:
            kept[place] = False
    return kept


def plain(block: MoEBlock, hidden: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    config, rows = block.config, hidden.reshape(-1, hidden.shape[-1])
    weights, indices = (rows @ block.gate.weight.T).softmax(-1).topk(config.router_top_k, -1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    kept = kept_choices(weights, indices, config)
    outputs = []
    for index, row in enumerate(rows):
        total = torch.zeros_like(row)
        for weight, expert, keep in zip(weights[index], indices[index], kept[index], strict=True):
            part: Any = block.experts.get_submodule(str(int(expert)))
            inner = functional.silu(part.gate_proj.weight @ row) * (part.up_proj.weight @ row)
            total = total + weight * keep * (part.down_proj.weight @ inner)
        if config.moe_shared_expert_size is not None:
            shared: Any = block.shared_expert
            inner = functional.silu(shared.gate_proj.weight @ row) * (shared.up_proj.weight @ row)
            gate = 1.0
            if config.moe_shared_expert_gate:
                gate = (block.shared_expert_gate.weight[0] @ row).sigmoid()
            total = total + gate * (shared.down_proj.weight @ inner)
        outputs.append(total)
    return torch.stack(outputs).view(hidden.shape)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": True, "moe_shared_expert_gate": False},
        {"router_top_k": 1, "moe_shared_expert_size": None, "moe_shared_expert_gate": False},
        {"router_top_k": 5},
        {"capacity_factor": 0.6},
        {"capacity_factor": 0.6, "drop_policy": "position", "norm_topk_prob": True},
        {"capacity_factor": 100.0},
    ],
)
def test_a_block_is_its_tokens_one_by_one(changes: dict[str, object]) -> None:
    block, hidden = block_and_input(**changes)
    mine, expected = block(hidden)[0], plain(block, hidden)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    wanted = [hidden, *block.parameters()]
    one = torch.autograd.grad(mine.sin().sum(), wanted)
    two = torch.autograd.grad(expected.sin().sum(), wanted, materialize_grads=True)
    for mine_to, expected_to in zip(one, two, strict=True):
        torch.testing.assert_close(mine_to, expected_to, rtol=0, atol=1e-11)


def test_capacity_drops_something_and_a_wide_one_nothing() -> None:
    config = moe_config(capacity_factor=0.6)
    block, hidden = block_and_input(capacity_factor=0.6)
    weights, indices, statistics = block.gate(hidden)
    per_expert = indices.flatten().bincount(minlength=6)
    room = math.ceil(indices.numel() / 5 * 0.6)
    assert per_expert[:5].max() == room
    assert per_expert[5] > 0
    assert weights[indices == 5].abs().max() == 0
    assert statistics[0].sum() == indices.numel()  # counted before anything is dropped
    assert kept_choices(weights.view(-1, 2), indices.view(-1, 2), config).all()


def test_statistics_and_dtypes() -> None:
    config = moe_config()
    router, hidden = Router(config).bfloat16(), torch.randn(2, 6, 48).bfloat16()
    router.initialise_("weight", router.weight.data, named_generator("router"))
    weights, indices, statistics = router(hidden)
    assert (weights.dtype, statistics.dtype) == (torch.bfloat16, torch.float32)
    assert (weights.shape, indices.shape) == ((2, 6, 2), (2, 6, 2))
    assert torch.equal(statistics[0], indices.flatten().bincount(minlength=5).float())
    torch.testing.assert_close(statistics[1].sum(), torch.tensor(12.0))
    counted = torch.zeros(2, 6, dtype=torch.bool)
    counted[0, :4] = True
    some = router(hidden, counted)[2]
    torch.testing.assert_close(some, router(hidden[:1, :4])[2])
    assert router(hidden.double().float().bfloat16())[2].requires_grad
    assert Router(config).double()(hidden.double())[2].dtype == torch.float64


def test_balancing_loss_at_balance_and_without_tokens() -> None:
    even = torch.tensor([[4.0] * 5, [2.0] * 5])  # 10 tokens, two experts each
    assert balancing_loss(even, 2).item() == pytest.approx(2.0)
    skewed = torch.tensor([[20.0, 0, 0, 0, 0], [8.0, 0.5, 0.5, 0.5, 0.5]])
    assert balancing_loss(skewed, 2).item() == pytest.approx(5 * 2.0 * 0.8)
    assert balancing_loss(torch.zeros(2, 5), 2) == 0


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_losses_carry_the_gradient_of_the_auxiliary_loss(scope: str) -> None:
    """Equal to adding it to every token's loss, whatever weights the tokens get later."""
    config = moe_config(aux_loss_scope=scope)
    model, ids = filled(config, torch.float64, scale=2.0), tokens(2, 10)
    scales = torch.linspace(0.1, 0.9, 20, dtype=torch.float64).view(2, 10)
    hidden, statistics = model.model(ids)
    auxiliary = auxiliary_loss(statistics, config)
    plain_losses = functional.cross_entropy(
        model.lm_head(hidden).flatten(0, 1), ids.flatten(), reduction="none"
    ).view(2, 10)
    (scales * (plain_losses + 0.2 * auxiliary)).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    losses = model(ids, labels=ids)
    torch.testing.assert_close(losses, plain_losses, rtol=0, atol=1e-12)
    assert model.auxiliary_loss is not None
    assert not model.auxiliary_loss.requires_grad
    torch.testing.assert_close(model.auxiliary_loss, auxiliary.detach())
    (scales * losses).sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-13, msg=name)


def test_layer_scope_sums_the_layers_own_losses() -> None:
    model, ids = filled(moe_config(aux_loss_scope="layer"), torch.float64, scale=2.0), tokens(2, 10)
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *call: seen.append(call[2][2].detach()))
    model(ids)
    expected = sum(balancing_loss(statistics, 2) / 2 for statistics in seen)
    torch.testing.assert_close(model.auxiliary_loss, expected)
    pooled = balancing_loss(sum(seen), 2)  # type: ignore[arg-type]
    assert abs(pooled - expected).item() > 0.01


def test_masked_tokens_are_not_counted() -> None:
    model, ids = filled(moe_config(), torch.float64, scale=2.0), tokens(2, 10)
    mask = torch.ones(2, 10)
    mask[1] = 0
    model(ids, labels=ids, loss_mask=mask)
    masked = model.auxiliary_loss
    model(ids[:1])
    torch.testing.assert_close(masked, model.auxiliary_loss)
    losses = model(ids, labels=ids, loss_mask=torch.zeros(2, 10))
    losses.sum().backward()
    assert model.auxiliary_loss == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(model).values())
    dense = filled(small_config())
    dense(ids, labels=ids)
    assert dense.auxiliary_loss is None


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("recompute", [False, True])
def test_label_of_no_loss_is_a_mask_of_0(scope: str, share: float, recompute: bool) -> None:
    """Losses, load balancing and all gradients, for any share of such labels, also all of them."""
    setting = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    config = moe_config(
        aux_loss_scope=scope,
        aux_loss_coefficient=0.5,
        recompute=setting if recompute else RecomputeConfig(),
    )
    ids = tokens(2, 16)
    mask = torch.rand(2, 16) >= share
    results = []
    for inputs in (
        {"labels": ids, "loss_mask": mask.double()},
        {"labels": ids.masked_fill(~mask, -100)},
        {"labels": ids.masked_fill(~mask, -100), "loss_mask": torch.ones(2, 16)},
        {"labels": ids.masked_fill(~mask, -100), "loss_mask": mask},
    ):
        model = filled(config, torch.float64, scale=2.0)
        losses = model(ids, **inputs)
        (losses.sum() / mask.sum().clamp_min(1)).backward()
        results.append((losses.detach(), model.auxiliary_loss, gradients(model)))
    for losses, auxiliary, found in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert torch.equal(auxiliary, results[0][1])
        for name, gradient in results[0][2].items():
            assert torch.equal(found[name], gradient), name


def test_load_balancing_does_not_grow_with_tokens_over_kept() -> None:
    """The mean over kept tokens adds the coefficient times the loss once, whatever is left out."""
    model, ids = (
        filled(moe_config(aux_loss_coefficient=0.5), torch.float64, scale=2.0),
        tokens(2, 16),
    )
    labels = ids.clone()
    labels[:, ::2] = -100
    model(ids, labels=labels).sum().div(16).backward()
    found = gradients(model)["model.layers.0.mlp.gate.weight"].clone()
    for parameter in model.parameters():
        parameter.grad = None
    model.config = replace(model.config, aux_loss_coefficient=0.0)
    model(ids, labels=labels).sum().div(16).backward()
    bare = gradients(model)["model.layers.0.mlp.gate.weight"].clone()
    counted = labels != -100
    hidden, statistics = model.model(ids, None, None, counted)
    (auxiliary,) = torch.autograd.grad(
        0.5 * balancing_loss(statistics, model.config.router_top_k),
        [model.model.layers[0].mlp.gate.weight],
    )
    torch.testing.assert_close(found - bare, auxiliary, rtol=1e-9, atol=1e-12)


def test_attached_gradient_by_hand() -> None:
    losses = torch.ones(3, requires_grad=True)
    auxiliary = torch.tensor(2.0, requires_grad=True)
    attached = with_auxiliary_gradient(losses, auxiliary, 0.5)
    assert torch.equal(attached, losses)
    (attached * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [1.0, 2.0, 3.0]
    assert auxiliary.grad == 3.0


SETTINGS = [
    RecomputeConfig(granularity="full", method="uniform", num_layers=1),
    RecomputeConfig(granularity="full", method="uniform", num_layers=2),
    RecomputeConfig(granularity="full", method="block", num_layers=2),
    RecomputeConfig(granularity="selective"),
    RecomputeConfig(granularity="selective", modules=("core_attn", "mlp")),
]


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("recompute", SETTINGS)
def test_recompute_changes_nothing(recompute: RecomputeConfig, scope: str) -> None:
    ids, results = tokens(2, 16), []
    for setting in (RecomputeConfig(), recompute):
        config = moe_config(
            num_layers=3, recompute=setting, hidden_dropout=0.1, aux_loss_scope=scope
        )
        model = filled(config, scale=2.0)
        torch.manual_seed(11)
        losses = model(ids, labels=ids)
        losses.mean().backward()
        results.append((losses, model.auxiliary_loss, gradients(model)))
    (one, auxiliary, expected), (two, again, found) = results
    assert torch.equal(one, two)
    assert torch.equal(auxiliary, again)  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def test_names_kinds_and_fusion() -> None:
    found = {p.name: p for p in parameters(moe_config())}
    layer = "model.layers.1.mlp"
    assert found[f"{layer}.gate.weight"].shape == (5, 48)
    assert found[f"{layer}.gate.weight"].kind is Kind.ROUTER
    assert found[f"{layer}.gate.weight"].route is Route.ADAMW_OWNER
    assert found[f"{layer}.shared_expert_gate.weight"].kind is Kind.ROUTER
    assert found[f"{layer}.shared_expert_gate.weight"].shape == (1, 48)
    assert found[f"{layer}.shared_expert.down_proj.weight"].shape == (48, 28)
    assert not found[f"{layer}.shared_expert.down_proj.weight"].expert
    experts = [p for p in found.values() if p.expert]
    assert len(experts) == 2 * 5 * 3
    assert all(p.route is Route.MATRIX and ".experts." in p.name for p in experts)
    blocks: dict[str, list[str]] = {}
    for parameter in experts:
        blocks.setdefault(parameter.fusion, []).append(parameter.name)
    assert len(blocks) == 4
    prefix = f"{layer}.experts."
    inner, outer = (
        blocks[found[f"{prefix}0.{name}.weight"].fusion] for name in ("up_proj", "down_proj")
    )
    assert inner == [f"{prefix}{e}.{n}_proj.weight" for e in range(5) for n in ("gate", "up")]
    assert outer == [f"{prefix}{e}.down_proj.weight" for e in range(5)]
    assert all(len(key) < 100 for key in blocks)


def test_initial_values() -> None:
    model = filled(moe_config(num_layers=8, hidden_size=64, init_method_std=0.05))
    for name, parameter in model.named_parameters():
        if ".mlp." in name and parameter.numel() > 300:
            expected = 0.05 / 4 if "down_proj" in name else 0.05
            assert abs(parameter.std().item() / expected - 1) < 0.15, name
    first, second = (
        model.get_parameter(f"model.layers.0.mlp.experts.{index}.up_proj.weight")
        for index in (0, 1)
    )
    assert not torch.equal(first, second)


def test_placed_experts_are_computed_as_views() -> None:
    """Back to back, the experts of a projection are one 3-D tensor and give the same numbers."""
    apart, placed, ids = filled(moe_config()), filled(moe_config()), tokens(2, 8)
    for layer in placed.model.layers:
        for names in layer.mlp.experts.fusion_blocks:
            members = [layer.mlp.experts.get_submodule(name).weight for name in names]
            whole = torch.cat([member.detach().flatten() for member in members])
            parts = whole.split([member.numel() for member in members])
            for member, part in zip(members, parts, strict=True):
                member.data = part.view(member.shape)
            size = len(members) // 5
            view = stacked([members[i : i + size] for i in range(0, len(members), size)])
            assert view.data_ptr() == members[0].data_ptr()
            assert view.shape[0] == 5
    one, two = apart(ids, labels=ids), placed(ids, labels=ids)
    assert torch.equal(one, two)
    one.mean().backward()
    two.mean().backward()
    for name, gradient in gradients(apart).items():
        assert torch.equal(gradient, gradients(placed)[name]), name


def test_backends_agree_in_the_model() -> None:
    """Sizes of whole 16 bytes, with and without dropped tokens."""
    ids = tokens(2, 12)
    for factor in (None, 0.7):
        results = []
        for backend in ("loop", "grouped"):
            config = moe_config(grouped_backend=backend, capacity_factor=factor)
            model = filled(config, scale=2.0)
            losses = model(ids, labels=ids)
            losses.mean().backward()
            results.append({"losses": losses.detach(), **gradients(model)})
        one, two = results
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"router_top_k": 6}, "router_top_k 6: there are 5 experts"),
        ({"moe_ffn_hidden_size": -1}, "moe_ffn_hidden_size is -1"),
        ({"moe_shared_expert_size": None}, "there is no shared expert"),
        ({"activation": "gelu"}, "experts compute swiglu only"),
        ({"add_bias_linear": True}, "experts have no biases"),
        ({"capacity_factor": 0.0}, "capacity_factor 0.0: must be positive"),
        ({"drop_policy": "random"}, "choose from probs, position"),
        ({"aux_loss_scope": "token"}, "choose from model, layer"),
        ({"aux_loss_coefficient": -1.0}, "must not be negative"),
        ({"grouped_backend": "triton"}, "choose from auto, grouped, loop"),
    ],
)
def test_bad_configs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        moe_config(**changes)
