"""Causal self-attention with grouped key/value heads.

Owns ``core_attention`` (scores, softmax, values) and ``SelfAttention``.  Invariants: q, k and v are
separate parameters computed as one fused linear; a mask is a bool tensor whose True means "may be
seen"; every backend computes the same function, softmax in FP32 inside kernels (FP64 for FP64
inputs).  Tested by ``tests/models/test_attention.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megamuon.kernels.linear import linear
from megamuon.kernels.rope import rotate
from megamuon.models.config import GPTConfig, ModelConfigError
from megamuon.models.layers import Linear, Norm, output_std

Rotary = tuple[
    Tensor, Tensor
]  # cosines and sines, broadcastable to (batch, positions, 1, channels / 2)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """``(batch, groups, positions, channels)`` with every group repeated ``times`` times."""
    if times == 1:
        return heads
    batch, groups, positions, channels = heads.shape
    spread = heads[:, :, None].expand(batch, groups, times, positions, channels)
    return spread.reshape(batch, groups * times, positions, channels)


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    softmax_in_fp32: bool,
) -> Tensor:
    scores = (query @ key.transpose(-1, -2)) * (1 / math.sqrt(query.shape[-1]))
    if mask is None:
        size = scores.shape[-1]
        mask = torch.ones(size, size, dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    narrow = scores.dtype in (torch.bfloat16, torch.float16)
    wide = torch.float32 if softmax_in_fp32 and narrow else scores.dtype
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype)
    return functional.dropout(weights, dropout, training=dropout > 0) @ value


@contextmanager
def _kernels(backend: str, query: Tensor, mask: Tensor | None, dropout: float) -> Iterator[None]:
    if backend == "auto":
        yield
        return
    if backend == "flash" and mask is not None:
        raise ModelConfigError(
            "attention_backend flash takes no attention mask; use auto with a mask"
        )
    if backend == "fused" and query.device.type != "cuda":
        raise ModelConfigError(
            f"attention_backend fused needs a GPU, not {query.device.type}; use auto"
        )
    chosen = SDPBackend.FLASH_ATTENTION if backend == "flash" else SDPBackend.CUDNN_ATTENTION
    with sdpa_kernel([chosen]):
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise ModelConfigError(
                f"attention_backend {backend} has no kernel for {query.dtype} with attention"
                f" dropout {dropout} on {query.device.type}; use auto"
            ) from error


def core_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    softmax_in_fp32: bool = True,
) -> Tensor:
    """Attention of ``query (batch, heads, positions, channels)`` over ``key``/``value (batch,
    groups, ...)``.

    ``mask``: bool ``(batch or 1, 1, positions, positions)``, True where a query may see a key;
    None: causal. ``dropout`` is the probability in use (0 in evaluation).  Scores are scaled by
    ``channels ** -0.5``. Raises ModelConfigError where the backend cannot do what is asked.
    """
    times = query.shape[1] // key.shape[1]
    if backend in ("unfused", "local"):
        return _explicit_attention(
            query, _repeated(key, times), _repeated(value, times), mask, dropout, softmax_in_fp32
        )
    # On GPUs only the half-precision kernels know groups; elsewhere they would fall back to
    # explicit scores.
    half = query.dtype in (torch.bfloat16, torch.float16)
    grouped = times > 1 and (query.device.type != "cuda" or (half and mask is None))
    if not grouped:
        key, value = _repeated(key, times), _repeated(value, times)
    with _kernels(backend, query, mask, dropout):
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            enable_gqa=grouped,
        )


class SelfAttention(nn.Module):
    """q|k|v as one fused linear, norms per head, rotation, attention, output projection."""

    fusion_blocks = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        size, std = config.hidden_size, config.init_method_std
        bias = config.add_bias_linear or config.add_qkv_bias
        self.q_proj = Linear(size, config.query_size, bias=bias, std=std)
        self.k_proj = Linear(size, config.key_size, bias=bias, std=std)
        self.v_proj = Linear(size, config.key_size, bias=bias, std=std)
        self.o_proj = Linear(
            config.query_size, size, bias=config.add_bias_linear, std=output_std(config)
        )
        if config.qk_layernorm:
            self.q_norm = Norm(config.kv_channels, config)
            self.k_norm = Norm(config.kv_channels, config)

    def _heads(self, hidden: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(batch, positions, heads, channels)``, normed and
        rotated.
        """
        config = self.config
        members = (self.q_proj, self.k_proj, self.v_proj)
        fused = linear(hidden, [m.weight for m in members], [m.bias for m in members])
        fused = fused.unflatten(-1, (-1, config.kv_channels))
        # Counted from the weights: a module that holds some of the heads computes those.
        heads, groups = (
            member.weight.shape[0] // config.kv_channels for member in (self.q_proj, self.k_proj)
        )
        if config.qk_layernorm:
            query, key, value = fused.split((heads, groups, groups), dim=2)
            query, key = self.q_norm(query), self.k_norm(key)
            if rotary is not None:
                query = rotate(query, *rotary, interleaved=config.rotary_interleaved)
                key = rotate(key, *rotary, interleaved=config.rotary_interleaved)
            return query, key, value
        both, value = fused.split((heads + groups, groups), dim=2)
        if rotary is not None:  # q and k lie side by side: one rotation serves both
            both = rotate(both, *rotary, interleaved=config.rotary_interleaved)
        query, key = both.split((heads, groups), dim=2)
        return query, key, value

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        config = self.config
        return core_attention(
            query,
            key,
            value,
            mask,
            backend=config.attention_backend,
            dropout=config.attention_dropout if self.training else 0.0,
            softmax_in_fp32=config.attention_softmax_in_fp32,
        )

    def forward(self, hidden: Tensor, rotary: Rotary | None, mask: Tensor | None) -> Tensor:
        """``hidden (batch, positions, size)`` to its shape; ``mask`` as in ``core_attention``."""
        query, key, value = (part.transpose(1, 2) for part in self._heads(hidden, rotary))
        config = self.config
        recompute = config.recompute
        selected = recompute.granularity == "selective" and "core_attn" in recompute.modules
        if selected and self.training and torch.is_grad_enabled():
            context = checkpoint(
                self._core,
                query,
                key,
                value,
                mask,
                use_reentrant=False,
                preserve_rng_state=config.attention_dropout > 0,
            )
        else:
            context = self._core(query, key, value, mask)
        return self.o_proj(context.transpose(1, 2).flatten(2))
