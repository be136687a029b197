"""The modules that hold parameters: linear maps, norms, tables, the output head and the MLP.

Owns the declarations (``logical_kinds``, ``fusion_blocks``) and the initial values of every
parameter.  Invariants: a module computes with whole weights and knows nothing of ranks; a weight's
initial values depend on its shape, its standard deviation and the generator alone.  Tested by
``tests/models/test_layers.py`` and ``test_gpt.py``.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.kernels.activations import swiglu
from megamuon.kernels.cross_entropy import cross_entropy
from megamuon.kernels.linear import linear
from megamuon.kernels.norm import rms_norm
from megamuon.matrices import Kind
from megamuon.models.config import GPTConfig


@torch.no_grad()
def fill_normal_(tensor: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill ``tensor`` from N(0, std^2), always drawn in FP32 on the generator's device and then
    cast.

    So runs in FP64, FP32 and BF16, and on other devices, start from the same numbers.
    """
    device = generator.device if generator is not None else tensor.device
    if tensor.dtype == torch.float32 and tensor.device == device and tensor.is_contiguous():
        tensor.normal_(0.0, std, generator=generator)
        return
    drawn = torch.empty(tensor.shape, dtype=torch.float32, device=device)
    tensor.copy_(drawn.normal_(0.0, std, generator=generator))


class Linear(nn.Module):
    """A linear map ``(..., in) -> (..., out)``; its members in a fusion block are computed by their
    parent.
    """

    logical_kinds: ClassVar[dict[str, Kind]] = {"weight": Kind.MATRIX, "bias": Kind.VECTOR}

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def initialise_(
        self, attribute: str, tensor: Tensor, generator: torch.Generator | None
    ) -> None:
        """Initial values of ``attribute``, written into a whole ``tensor``."""
        if attribute == "bias":
            tensor.zero_()
        else:
            fill_normal_(tensor, self.std, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs (..., in)`` to ``(..., out)``."""
        return linear(inputs, (self.weight,), (self.bias,))


class Embedding(nn.Module):
    """A table of rows: tokens or positions."""

    logical_kinds: ClassVar[dict[str, Kind]] = {"weight": Kind.EMBEDDING}

    def __init__(self, rows: int, size: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(rows, size))

    def initialise_(
        self, attribute: str, tensor: Tensor, generator: torch.Generator | None
    ) -> None:
        """Initial values of ``attribute``, written into a whole ``tensor``."""
        fill_normal_(tensor, self.std, generator)

    def forward(self, index: Tensor) -> Tensor:
        """``index (...)`` int64 to ``(..., size)``."""
        return functional.embedding(index, self.weight)


class Head(nn.Module):
    """The output projection onto the vocabulary; ``weight`` is the embedding's own parameter where
    they are tied.
    """

    logical_kinds: ClassVar[dict[str, Kind]] = {"weight": Kind.HEAD}

    def __init__(self, weight: nn.Parameter, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = weight

    def initialise_(
        self, attribute: str, tensor: Tensor, generator: torch.Generator | None
    ) -> None:
        """Initial values of ``attribute``, written into a whole ``tensor``."""
        fill_normal_(tensor, self.std, generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden (..., size)`` to logits ``(..., vocabulary)``."""
        return linear(hidden, (self.weight,))


class TokenLoss(nn.Module):
    """What becomes of logits: losses where there are labels."""

    def forward(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """``logits (..., vocabulary)`` and ``labels (...)`` to losses ``(...)``; logits without
        labels.
        """
        return logits if labels is None else cross_entropy(logits, labels)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim; gains are stored around 0 with ``layernorm_1p``."""

    logical_kinds: ClassVar[dict[str, Kind]] = {"weight": Kind.VECTOR, "bias": Kind.VECTOR}

    def __init__(self, size: int, config: GPTConfig) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.zero_centred = config.layernorm_1p
        self.is_rms = config.normalization == "RMSNorm"
        self.weight = nn.Parameter(torch.empty(size))
        self.register_parameter("bias", None if self.is_rms else nn.Parameter(torch.empty(size)))

    def initialise_(
        self, attribute: str, tensor: Tensor, generator: torch.Generator | None
    ) -> None:
        """Initial values of ``attribute``, written into a whole ``tensor``."""
        tensor.fill_(1.0 if attribute == "weight" and not self.zero_centred else 0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs (..., size)`` to the same shape."""
        if self.is_rms:
            return rms_norm(
                inputs, self.weight, epsilon=self.epsilon, zero_centred=self.zero_centred
            )
        gain = 1 + self.weight if self.zero_centred else self.weight
        return functional.layer_norm(inputs, inputs.shape[-1:], gain, self.bias, self.epsilon)


def output_std(config: GPTConfig) -> float:
    """Standard deviation of maps that write to the residual stream: ``std / sqrt(2 * layers)``
    (GPT-2, Megatron).
    """
    return config.init_method_std / math.sqrt(2 * config.num_layers)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one fused linear."""

    fusion_blocks = (("gate_proj", "up_proj"),)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.ffn_hidden_size
        bias, std = config.add_bias_linear, config.init_method_std
        self.gate_proj = Linear(size, width, bias=bias, std=std)
        self.up_proj = Linear(size, width, bias=bias, std=std)
        self.down_proj = Linear(width, size, bias=bias, std=output_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden (..., size)`` to the same shape."""
        gate, up = self.gate_proj, self.up_proj
        gate_up = linear(hidden, (gate.weight, up.weight), (gate.bias, up.bias))
        return self.down_proj(swiglu(gate_up))


def squared_relu(inputs: Tensor) -> Tensor:
    """``relu(x)^2`` (Primer; Megatron's ``--squared-relu``)."""
    return functional.relu(inputs).square()


class PlainMLP(nn.Module):
    """``down(activation(up(x)))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.activation = config.activation
        self.up_proj = Linear(size, width, bias=bias, std=config.init_method_std)
        self.down_proj = Linear(width, size, bias=bias, std=output_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden (..., size)`` to the same shape."""
        inner = self.up_proj(hidden)
        if self.activation == "squared_relu":
            return self.down_proj(squared_relu(inner))
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down_proj(functional.gelu(inner, approximate=approximate))


def build_mlp(config: GPTConfig) -> nn.Module:
    """The MLP that ``config.activation`` asks for."""
    return GatedMLP(config) if config.activation == "swiglu" else PlainMLP(config)
