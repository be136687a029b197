"""The whole model: names, ties, initial values, masks, dropout, precision and fused views."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamuon.kernels.linear import adjacent
from megamuon.matrices import Kind, collect
from megamuon.models import GPT, GPTConfig
from tests.support.models import GPT2, filled, gradients, named_generator, small_config, tokens


def test_names_of_the_classic_options() -> None:
    with torch.device("meta"):
        model = GPT(small_config(**GPT2))
    names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["model.embed_tokens.weight", "model.position_embeddings.weight"]
    assert "model.layers.1.mlp.up_proj.bias" in names
    assert "model.layers.0.input_layernorm.bias" in names
    assert not any("gate_proj" in name for name in names)
    kinds = {p.name: p.kind for p in collect(model, layers=GPT.layer_classes)}
    assert kinds["model.position_embeddings.weight"] is Kind.EMBEDDING
    assert list(model.buffers()) == []


def test_a_tied_head_stays_tied_through_conversions() -> None:
    with torch.device("meta"):
        model = GPT(small_config())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for converted in (model.to_empty(device="cpu"), model.double(), model.bfloat16()):
        assert converted.lm_head.weight is converted.model.embed_tokens.weight
    (table,) = (p for p in collect(model, layers=GPT.layer_classes) if p.aliases)
    assert (table.name, table.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))
    untied = GPT(small_config(tied_embeddings=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    kinds = {p.name: p.kind for p in collect(untied, layers=GPT.layer_classes)}
    assert kinds["lm_head.weight"] is Kind.HEAD


def test_initial_values() -> None:
    config = small_config(num_layers=8, hidden_size=64, init_method_std=0.05)
    model = filled(config)
    residual = 0.05 / math.sqrt(16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = residual if "o_proj" in name or "down_proj" in name else 0.05
            assert abs(parameter.std().item() / expected - 1) < 0.1, name
    centred = GPT(small_config(layernorm_1p=True))
    gain = torch.full((48,), 7.0)
    centred.initialise_("model.norm.weight", gain)
    assert gain.abs().max() == 0
    separate = GPT(small_config(embedding_init_method_std=1.0))
    table = torch.empty(67, 48)
    separate.initialise_("lm_head.weight", table, torch.Generator().manual_seed(0))
    assert abs(table.std().item() - 1) < 0.1


def test_initial_values_do_not_depend_on_order_dtype_or_device_of_the_model() -> None:
    with torch.device("meta"):
        model = GPT(small_config())
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def draw(names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
        values = {}
        for name in names:
            values[name] = torch.empty(shapes[name], dtype=dtype)
            model.initialise_(name, values[name], named_generator(name))
        return values

    forward = draw(list(shapes), torch.float32)
    backward = draw(list(shapes)[::-1], torch.float64)
    for name in shapes:
        assert torch.equal(forward[name].double(), backward[name]), name


def test_initialise_refuses_unknown_names_and_pieces() -> None:
    model = GPT(small_config(add_qkv_bias=False))
    with pytest.raises(KeyError, match="model.layers.9.mlp"):
        model.initialise_("model.layers.9.mlp.up_proj.weight", torch.empty(1))
    with pytest.raises(KeyError, match="q_proj.bias"):
        model.initialise_("model.layers.0.self_attn.q_proj.bias", torch.empty(64))
    with pytest.raises(ValueError, match=r"model.norm.weight.*\(48,\).*\(24,\)"):
        model.initialise_("model.norm.weight", torch.empty(24))


def test_losses_are_those_of_the_logits() -> None:
    model, ids = filled(small_config(), scale=1.5), tokens(2, 12)
    labels = ids.roll(-1, 1)
    mask = torch.ones(2, 12)
    mask[0, 3] = 0
    logits = model(ids)
    assert logits.shape == (2, 12, 67)
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(model(ids, labels=labels), expected.view(2, 12))
    masked = model(ids, labels=labels, loss_mask=mask)
    assert masked[0, 3] == 0
    torch.testing.assert_close(masked, expected.view(2, 12) * mask)
    bf16 = filled(small_config(), torch.bfloat16)(ids, labels=labels)
    assert bf16.dtype == torch.float32


def test_documents_do_not_see_each_other() -> None:
    """Two documents in one row give what each gives alone, with positions that start again."""
    model = filled(small_config(), torch.float64, scale=1.5)
    first, second = tokens(1, 7), tokens(1, 12)[:, 7:]
    row = torch.cat((first, second), 1)
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    documents = torch.cat((torch.zeros(7), torch.ones(5)))[None].long()
    together = model(row, position_ids=positions, document_ids=documents)
    alone = torch.cat((model(first), model(second)), 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    masked = (documents[:, :, None] != documents[:, None, :]).unsqueeze(1)
    masked = masked | torch.ones(12, 12, dtype=torch.bool).triu(1)
    by_mask = model(row, position_ids=positions, attention_mask=masked)
    torch.testing.assert_close(by_mask, together, rtol=0, atol=0)
    assert not torch.allclose(model(row), alone)
    with pytest.raises(ValueError, match="not both"):
        model(row, attention_mask=masked, document_ids=documents)


def test_shifted_positions_rotate_relatively_only() -> None:
    model, ids = filled(small_config(), torch.float64, scale=1.5), tokens(1, 8)
    shifted = model(ids, position_ids=torch.arange(20, 28)[None])
    torch.testing.assert_close(shifted, model(ids), rtol=0, atol=1e-11)
    assert torch.equal(model(ids, position_ids=torch.arange(8)[None]), model(ids))
    partial = filled(small_config(rotary_percent=0.5), torch.float64, scale=1.5)
    assert not torch.allclose(partial(ids), model(ids))


def test_too_long_for_learned_positions() -> None:
    model = filled(small_config(**GPT2))
    with pytest.raises(ValueError, match="max_position_embeddings to 65"):
        model(tokens(1, 65))


def test_dropout_follows_the_seed_and_stops_in_evaluation() -> None:
    config = small_config(hidden_dropout=0.2, attention_dropout=0.2)
    model, plain, ids = filled(config), filled(small_config()), tokens(2, 8)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert torch.equal(model.eval()(ids), plain(ids))


class _OnlyWide(TorchDispatchMode):
    """Fails on any operation that makes a floating-point tensor narrower than FP64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                assert leaf.dtype == torch.float64, f"{func} made {leaf.dtype}"
        return result


@pytest.mark.parametrize("changes", [{}, {"qk_layernorm": True, "add_qkv_bias": False}, GPT2])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_fp64_has_no_narrow_operation(changes: dict[str, object], backend: str) -> None:
    model = filled(small_config(attention_backend=backend, **changes), torch.float64)
    ids = tokens(2, 8)
    with _OnlyWide():
        loss = model(ids, labels=ids).mean()
        loss.backward()
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())


def plain_qwen(weights: dict[str, Tensor], config: GPTConfig, ids: Tensor) -> Tensor:
    """Logits of a Qwen2-like decoder, written out from its definition in FP64."""
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    batch, length = ids.shape

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_epsilon) * gain

    steps = config.rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * steps
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        number = torch.complex(first.contiguous(), second.contiguous()) * turn
        return torch.cat((number.real, number.imag), -1)

    hidden = weights["model.embed_tokens.weight"][ids]
    for index in range(config.num_layers):
        w = {
            key.removeprefix(f"model.layers.{index}."): value
            for key, value in weights.items()
            if key.startswith(f"model.layers.{index}.")
        }
        x = norm(hidden, w["input_layernorm.weight"])
        parts = {}
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            linear = x @ w[f"self_attn.{part}_proj.weight"].T + w[f"self_attn.{part}_proj.bias"]
            parts[part] = linear.view(batch, length, count, size)
        query, key = rotated(parts["q"]), rotated(parts["k"])
        key, value = (t.repeat_interleave(heads // groups, 2) for t in (key, parts["v"]))
        scores = torch.einsum("bihc,bjhc->bhij", query, key) / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weight = scores.masked_fill(future, -math.inf).softmax(-1)
        context = torch.einsum("bhij,bjhc->bihc", weight, value).flatten(2)
        hidden = hidden + context @ w["self_attn.o_proj.weight"].T
        x = norm(hidden, w["post_attention_layernorm.weight"])
        gate = x @ w["mlp.gate_proj.weight"].T
        inner = gate * torch.sigmoid(gate) * (x @ w["mlp.up_proj.weight"].T)
        hidden = hidden + inner @ w["mlp.down_proj.weight"].T
    return norm(hidden, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def test_fp64_equals_the_written_out_decoder() -> None:
    config = small_config()
    model, ids = filled(config, torch.float64, scale=2.0), tokens(2, 10)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = plain_qwen(weights, config, ids)
    mine = model(ids)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    expected.sin().sum().backward()
    mine.sin().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-11, atol=1e-11, msg=name)


def test_members_that_lie_together_are_computed_as_a_view() -> None:
    """Placed back to back, q|k|v and gate|up give the same numbers and are never concatenated."""
    apart, placed, ids = filled(small_config()), filled(small_config()), tokens(2, 8)
    for layer in placed.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for children in parent.fusion_blocks:
                for attribute in ("weight", "bias"):
                    members = [getattr(getattr(parent, child), attribute) for child in children]
                    if members[0] is None:
                        continue
                    whole = torch.cat([m.detach() for m in members])
                    parts = whole.split([m.shape[0] for m in members])
                    for member, part in zip(members, parts, strict=True):
                        member.data = part
                    assert adjacent(members)

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.copied: list[tuple[int, ...]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.cat.default:
                self.copied.append(tuple(args[0][0].shape))
            return func(*args, **(kwargs or {}))

    with Counter() as separate:
        one = apart(ids, labels=ids)
    with Counter() as together:
        two = placed(ids, labels=ids)
    assert len(separate.copied) == 6  # two layers: q|k|v weights and biases, gate|up weights
    assert together.copied == []
    assert torch.equal(one, two)
    one.mean().backward()
    two.mean().backward()
    for name, gradient in gradients(apart).items():
        assert torch.equal(gradient, gradients(placed)[name]), name
