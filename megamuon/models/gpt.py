"""The decoder: embedding, layers, final norm, output head.

Owns ``GPT`` and ``DecoderLayer``.  Invariants: parameter names are those of Qwen2/Qwen3/Llama in
``transformers``, so a state dict of either fits the other; the model holds no buffers and no
parallel code; construction works on the meta device and a tied head is the embedding's own
parameter.  Tested by ``tests/models/test_gpt.py``, ``test_parity.py`` and ``test_moe.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.kernels.cross_entropy import IGNORED
from megamuon.kernels.rope import RotaryTable
from megamuon.models.attention import Rotary, SelfAttention
from megamuon.models.config import GPTConfig
from megamuon.models.layers import Embedding, Head, Norm, TokenLoss, build_mlp
from megamuon.models.moe import MoEBlock, auxiliary_loss, with_auxiliary_gradient
from megamuon.models.recompute import Running, maybe_checkpoint, run_layers


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn = SelfAttention(config)
        self.mlp = build_mlp(config) if config.num_experts is None else MoEBlock(config)
        self.input_layernorm = Norm(config.hidden_size, config)
        self.post_attention_layernorm = Norm(config.hidden_size, config)

    def _dropped(self, update: Tensor) -> Tensor:
        rate = self.config.hidden_dropout
        return functional.dropout(update, rate, self.training) if rate > 0 else update

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotary | None = None,
        mask: Tensor | None = None,
        counted: Tensor | None = None,
        statistics: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``hidden (batch, positions, size)`` to its shape; ``mask`` as in ``core_attention``.

        A layer with experts also takes the routers' running ``statistics`` of the layers below
        (None: it is the first) and gives ``(hidden, statistics)`` with its own added;
        ``counted`` as in ``Router``.
        """
        hidden = hidden + self._dropped(self.self_attn(self.input_layernorm(hidden), rotary, mask))
        normed = self.post_attention_layernorm(hidden)
        routed = self.config.num_experts is not None
        inputs = (normed, counted) if routed else (normed,)
        update = maybe_checkpoint(
            self.mlp, "mlp", *inputs, config=self.config, training=self.training
        )
        if not routed:
            return hidden + self._dropped(update)
        update, own = update
        return hidden + self._dropped(update), own if statistics is None else statistics + own


class Decoder(nn.Module):
    """Everything below the output head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        std = config.embedding_init_method_std
        std = config.init_method_std if std is None else std
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, std=std)
        if config.position_embedding == "learned_absolute":
            self.position_embeddings = Embedding(
                config.max_position_embeddings, config.hidden_size, std=std
            )
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config)
        # A plain object, not a buffer: tables are no part of the model's state and exist on no meta
        # device.
        self.rotary_table = RotaryTable(
            size=config.rotary_size,
            base=config.rotary_base,
            scaling=config.rope_scaling,
            interpolation=config.rotary_interpolation,
        )

    def _embedded(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        hidden = self.embed_tokens(tokens)
        if self.config.position_embedding == "learned_absolute":
            length, limit = tokens.shape[1], self.config.max_position_embeddings
            if length > limit:
                raise ValueError(
                    f"sequence of {length} tokens with {limit} learned positions: raise"
                    f" max_position_embeddings to {length} or shorten the sequence"
                )
            if position_ids is None:
                position_ids = torch.arange(length, device=tokens.device)
            hidden = hidden + self.position_embeddings(position_ids)
        rate = self.config.hidden_dropout
        return functional.dropout(hidden, rate, self.training) if rate > 0 else hidden

    def _rotary(
        self, tokens: Tensor, position_ids: Tensor | None, dtype: torch.dtype
    ) -> Rotary | None:
        if self.config.position_embedding != "rope":
            return None
        if position_ids is None:
            cosines, sines = self.rotary_table(tokens.shape[1], tokens.device, dtype)
        else:  # any position may occur: computing them is cheaper than a table of the longest
            cosines, sines = self.rotary_table.at(position_ids, dtype)
        return cosines.unsqueeze(-2), sines.unsqueeze(-2)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Running:
        """``tokens (batch, positions)`` to normed hidden states ``(batch, positions, size)``, and
        the routers' statistics (None without experts).
        """
        hidden = self._embedded(tokens, position_ids)
        rotary = self._rotary(tokens, position_ids, hidden.dtype)
        context = (rotary, mask) if self.config.num_experts is None else (rotary, mask, counted)
        hidden, statistics = run_layers(
            self.layers, hidden, *context, config=self.config, training=self.training
        )
        return self.norm(hidden), statistics


def counted_tokens(loss_mask: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """Tokens that the load-balancing loss counts, ``(batch, positions)`` bool; None: all.

    Left out are those whose loss is masked and those that no token may see (padding).
    """
    counted = None if loss_mask is None else loss_mask != 0
    if attention_mask is not None:
        seen = attention_mask.all(dim=-2)[:, 0].logical_not()
        counted = seen if counted is None else counted & seen
    return counted


def kept_tokens(labels: Tensor | None, loss_mask: Tensor | None) -> Tensor | None:
    """``loss_mask`` with 0 where the label says that there is no loss; None: all tokens are kept.

    ``(batch, positions)``, of the mask's dtype, bool without a mask.
    """
    if labels is None:
        return loss_mask
    ignored = labels == IGNORED
    return ignored.logical_not() if loss_mask is None else loss_mask.masked_fill(ignored, 0)


def document_mask(document_ids: Tensor) -> Tensor:
    """Mask (True: may be seen) for causal attention inside documents.

    ``document_ids (batch, positions)`` of integers -> ``(batch, 1, positions, positions)`` bool.
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril_().unsqueeze(1)


class GPT(nn.Module):
    """A decoder with its output head: logits, or losses where labels are given."""

    layer_classes: ClassVar[tuple[type[nn.Module], ...]] = (DecoderLayer,)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        table = self.model.embed_tokens
        weight = (
            table.weight if config.tied_embeddings else nn.Parameter(torch.empty_like(table.weight))
        )
        self.lm_head = Head(weight, std=table.std)
        # Of the last forward pass, without its coefficient and graph; None without experts.
        self.auxiliary_loss: Tensor | None = None
        self.loss = TokenLoss()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        """Keep a tied head tied: ``to_empty`` would give each name a parameter of its own."""
        super()._apply(fn, recurse)
        if self.config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def initialise_(
        self, name: str, tensor: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill a whole ``tensor`` with the initial values of the parameter called ``name``, in
        place.

        Matrices and tables are normal with ``init_method_std``, maps into the residual stream with
        ``std / sqrt(2 * layers)``, gains 1 (0 with ``layernorm_1p``), biases 0.  The values depend
        on the generator, the shape and the name's module only.  Raises KeyError for an unknown
        name, ValueError for a piece of a tensor.
        """
        path, _, attribute = name.rpartition(".")
        try:
            module = self.get_submodule(path)
            parameter = module._parameters[attribute]
        except (AttributeError, KeyError):
            parameter = None
        if parameter is None:
            raise KeyError(f"the model has no parameter called {name!r}")
        whole = tuple(getattr(parameter, "whole_shape", parameter.shape))
        if whole != tuple(tensor.shape):
            raise ValueError(
                f"{name}: initial values are made for the whole {whole},"
                f" not for {tuple(tensor.shape)}"
            )
        with torch.no_grad():
            module.initialise_(attribute, tensor, generator)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(batch, positions, vocabulary)``, or per-token losses ``(batch, positions)`` if
        labels are given.

        tokens, position_ids, labels: ``(batch, positions)`` int64.  Labels are already shifted, as
        in Megatron's batches.  loss_mask ``(batch, positions)``: tokens where it is 0 get loss 0,
        and routers do not count them; other weights are the loss function's business.  The label
        -100 is the same as a mask of 0.
        attention_mask: bool ``(batch or 1, 1, positions, positions)``, True where a key is *masked*
        (Megatron's convention).  document_ids ``(batch, positions)``: attention stays inside equal
        ids.  Without either, attention is causal.  Losses are FP32 (FP64 for FP64 models), in nats.

        With experts, ``auxiliary_loss`` holds the load-balancing loss afterwards. Losses do not
        contain it; their backward pass adds ``aux_loss_coefficient`` times its gradient.
        """
        if attention_mask is not None and document_ids is not None:
            raise ValueError("give attention_mask or document_ids, not both")
        mask = None
        if document_ids is not None:
            mask = document_mask(document_ids)
        elif attention_mask is not None:
            mask = attention_mask.logical_not()
        counted = None
        if self.config.num_experts is not None:
            loss_mask = kept_tokens(labels, loss_mask)
            counted = counted_tokens(loss_mask, attention_mask)
        hidden, statistics = self.model(tokens, position_ids, mask, counted)
        result = self.loss(self.lm_head(hidden), labels)
        if statistics is not None:
            auxiliary = auxiliary_loss(statistics, self.config)
            self.auxiliary_loss = auxiliary.detach()
            coefficient = self.config.aux_loss_coefficient
            if labels is not None and coefficient > 0:  # before the mask: masked tokens carry none
                result = with_auxiliary_gradient(result, auxiliary, coefficient)
        if labels is None or loss_mask is None:
            return result
        return result.masked_fill(loss_mask == 0, 0)
