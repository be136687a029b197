"""The kernels and modules of the decoder against plain formulas in FP64 and against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.kernels.activations import swiglu
from megamuon.kernels.cross_entropy import cross_entropy
from megamuon.kernels.norm import rms_norm
from megamuon.kernels.rope import RopeScaling, RotaryTable, inverse_frequencies, rotate
from megamuon.matrices import Kind, declared_kind
from megamuon.models.layers import Linear, Norm, PlainMLP, fill_normal_
from tests.support.models import small_config


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_rms_norm_value_and_gradients(zero_centred: bool) -> None:
    x, gain = random(2, 3, 8).requires_grad_(), random(8).requires_grad_()
    mine = rms_norm(x, gain, epsilon=1e-3, zero_centred=zero_centred)
    factor = 1 + gain if zero_centred else gain
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * factor
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda a, b: rms_norm(a, b, epsilon=1e-3, zero_centred=zero_centred), (x, gain)
    )


def test_rms_norm_in_bf16_casts_before_the_gain() -> None:
    """Qwen2's order: the normalised value is rounded to BF16, then multiplied in BF16."""
    x, gain = random(4, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    mine = rms_norm(x, gain, epsilon=1e-6)
    assert mine.dtype == torch.bfloat16
    assert torch.equal(mine, gain * normed.to(torch.bfloat16))
    assert not torch.equal(mine, (gain.float() * normed).to(torch.bfloat16))


def test_swiglu_value_and_gradient() -> None:
    x = random(3, 10).requires_grad_()
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(swiglu(x), gate * torch.sigmoid(gate) * up, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(swiglu, (x,))


def plain_rotation(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotation of complex numbers: an independent statement of what RoPE does."""
    turned = 2 * angles.shape[-1]
    part = x[..., :turned]
    if interleaved:
        number = torch.complex(part[..., 0::2].contiguous(), part[..., 1::2].contiguous())
    else:
        number = torch.complex(*(half.contiguous() for half in part.chunk(2, -1)))
    number = number * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    if interleaved:
        part = torch.view_as_real(number).flatten(-2)
    else:
        part = torch.cat((number.real, number.imag), -1)
    return torch.cat((part, x[..., turned:]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [4, 8])
def test_rotation_value_and_gradient(interleaved: bool, turned: int) -> None:
    x = random(2, 5, 3, 8).requires_grad_()
    cosines, sines = RotaryTable(size=turned, base=100.0)(5, x.device, x.dtype)
    steps = 1 / 100.0 ** (torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    angles = torch.arange(5.0, dtype=torch.float64)[:, None] * steps
    table = (cosines[:, None], sines[:, None])
    mine = rotate(x, *table, interleaved=interleaved)
    torch.testing.assert_close(mine, plain_rotation(x, angles, interleaved), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda a: rotate(a, *table, interleaved=interleaved), (x,))


def test_table_grows_keeps_values_and_interpolates() -> None:
    table = RotaryTable(size=8, base=100.0, interpolation=2.0)
    device = torch.device("cpu")
    short = table(4, device, torch.float32)[0].clone()
    long = table(9, device, torch.float32)[0]
    assert long.shape == (9, 4)
    assert torch.equal(long[:4], short)
    plain = RotaryTable(size=8, base=100.0)(5, device, torch.float32)[0]
    assert torch.equal(long[::2], plain)
    assert table(4, device, torch.float64)[0].dtype == torch.float64
    assert torch.equal(table(4, device, torch.bfloat16)[0], short.bfloat16())


def test_llama_frequency_scaling_matches_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    mine = inverse_frequencies(128, 500000.0, RopeScaling(), torch.device("cpu"), torch.float32)
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(
        mine, inverse_frequencies(128, 500000.0, None, torch.device("cpu"), torch.float32)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_matches_torch(dtype: torch.dtype) -> None:
    logits = (10 * random(3, 4, 11)).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(0))
    labels[1, 2] = -100
    weight = random(3, 4).to(torch.float64 if dtype == torch.float64 else torch.float32)
    wide = logits.to(weight.dtype)
    expected = functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    (expected.view(3, 4) * weight).sum().backward()
    to_logits, logits.grad = logits.grad, None
    mine = cross_entropy(logits, labels)
    assert mine.dtype == weight.dtype
    assert mine[1, 2] == 0
    (mine * weight).sum().backward()
    tight = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(mine, expected.view(3, 4), rtol=tight, atol=tight)
    loose = 1e-2 if dtype == torch.bfloat16 else tight
    torch.testing.assert_close(logits.grad, to_logits, rtol=loose, atol=loose)


def test_cross_entropy_of_huge_logits_stays_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.sum().backward()
    assert loss.item() == 2e4
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


def test_layer_norm_with_zero_centred_gain() -> None:
    config = small_config(normalization="LayerNorm", layernorm_1p=True)
    norm = Norm(48, config)
    for name, parameter in norm.named_parameters():
        norm.initialise_(name, parameter.data, None)
    x = random(2, 48, dtype=torch.float32)
    assert torch.equal(norm.weight, torch.zeros(48))
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (48,), eps=1e-6))


def test_activations_of_the_plain_mlp() -> None:
    x = random(2, 48, dtype=torch.float32)
    for name, formula in {
        "gelu": lambda y: y * 0.5 * (1 + torch.erf(y / math.sqrt(2))),
        "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
        "squared_relu": lambda y: y.clamp(min=0) ** 2,
    }.items():
        mlp = PlainMLP(small_config(activation=name))
        for child in (mlp.up_proj, mlp.down_proj):
            child.initialise_("weight", child.weight.data, torch.Generator().manual_seed(1))
            child.weight.data.mul_(20)
        inner = formula(x @ mlp.up_proj.weight.T)
        torch.testing.assert_close(mlp(x), inner @ mlp.down_proj.weight.T, rtol=1e-5, atol=1e-5)


def test_declarations() -> None:
    layer = Linear(3, 4, bias=True, std=0.1)
    assert declared_kind(layer, "weight", layer.weight) is Kind.MATRIX
    assert declared_kind(layer, "bias", layer.bias) is Kind.VECTOR


def test_draws_are_the_same_in_every_dtype_and_stride() -> None:
    drawn = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        drawn[dtype] = torch.empty(33, 17, dtype=dtype)
        fill_normal_(drawn[dtype], 0.02, torch.Generator().manual_seed(9))
    assert torch.equal(drawn[torch.float32].double(), drawn[torch.float64])
    assert torch.equal(drawn[torch.float32].bfloat16(), drawn[torch.bfloat16])
    strided = nn.Parameter(torch.empty(17, 33)).t()
    fill_normal_(strided, 0.02, torch.Generator().manual_seed(9))
    assert torch.equal(strided, drawn[torch.float32])
    assert abs(drawn[torch.float64].std().item() / 0.02 - 1) < 0.1
