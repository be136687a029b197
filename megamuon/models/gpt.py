"""The dense decoder: embedding, layers, final norm, output head.

Owns ``GPT`` and ``DecoderLayer``.  Invariants: parameter names are those of Qwen2/Qwen3/Llama in
``transformers``, so a state dict of either fits the other; the model holds no buffers and no
parallel code; construction works on the meta device and a tied head is the embedding's own
parameter.  Tested by ``tests/models/test_gpt.py`` and ``test_parity.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.kernels.cross_entropy import cross_entropy
from megamuon.kernels.rope import RotaryTable
from megamuon.models.attention import Rotary, SelfAttention
from megamuon.models.config import GPTConfig
from megamuon.models.layers import Embedding, Head, Norm, build_mlp
from megamuon.models.recompute import maybe_checkpoint, run_layers


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn = SelfAttention(config)
        self.mlp = build_mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config)
        self.post_attention_layernorm = Norm(config.hidden_size, config)

    def _dropped(self, update: Tensor) -> Tensor:
        rate = self.config.hidden_dropout
        return functional.dropout(update, rate, self.training) if rate > 0 else update

    def forward(
        self, hidden: Tensor, rotary: Rotary | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """``hidden (batch, positions, size)`` to its shape; ``mask`` as in ``core_attention``."""
        hidden = hidden + self._dropped(self.self_attn(self.input_layernorm(hidden), rotary, mask))
        normed = self.post_attention_layernorm(hidden)
        update = maybe_checkpoint(
            self.mlp, "mlp", normed, config=self.config, training=self.training
        )
        return hidden + self._dropped(update)


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
        self, tokens: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """``tokens (batch, positions)`` to normed hidden states ``(batch, positions, size)``."""
        hidden = self._embedded(tokens, position_ids)
        rotary = self._rotary(tokens, position_ids, hidden.dtype)
        hidden = run_layers(
            self.layers, hidden, rotary, mask, config=self.config, training=self.training
        )
        return self.norm(hidden)


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
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"{name}: initial values are made for the whole {tuple(parameter.shape)},"
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

        tokens, position_ids, labels: ``(batch, positions)`` int64; the label -100 gives loss 0.
        Labels are already shifted, as in Megatron's batches.  loss_mask ``(batch, positions)``:
        tokens where it is 0 get loss 0; other weights are the loss function's business.
        attention_mask: bool ``(batch or 1, 1, positions, positions)``, True where a key is *masked*
        (Megatron's convention).  document_ids ``(batch, positions)``: attention stays inside equal
        ids.  Without either, attention is causal.  Losses are FP32 (FP64 for FP64 models), in nats.
        """
        if attention_mask is not None and document_ids is not None:
            raise ValueError("give attention_mask or document_ids, not both")
        mask = None
        if document_ids is not None:
            mask = document_mask(document_ids)
        elif attention_mask is not None:
            mask = attention_mask.logical_not()
        logits = self.lm_head(self.model(tokens, position_ids, mask))
        if labels is None:
            return logits
        losses = cross_entropy(logits, labels)
        return losses if loss_mask is None else losses.masked_fill(loss_mask == 0, 0)
