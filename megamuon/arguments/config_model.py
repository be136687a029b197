"""Flags of the model and its tokenizer.

Owns ``ModelFlags`` (architecture) and ``TokenizerFlags``. Invariant: a field name is Megatron's
dest and its default Megatron's, except where the flag table records a deviation. Tested by
``tests/arguments/test_table.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megamuon.flags import flag


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Architecture of a decoder; a preset fills what the command line leaves out."""

    model: str | None = flag(None, "architecture preset; explicit flags win over it")
    num_layers: int | None = flag(None, "decoder layers", low=1)
    hidden_size: int | None = flag(None, "width of the residual stream", low=1)
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP; 4h when not given, or int(8h/3/64)*64 with --swiglu", low=1
    )
    num_attention_heads: int | None = flag(None, "query heads", low=1)
    group_query_attention: bool = flag(False, "share key and value heads between query heads")
    num_query_groups: int = flag(1, "key/value heads with --group-query-attention", low=1)
    kv_channels: int | None = flag(None, "width of a head; hidden/heads when not given", low=1)
    max_position_embeddings: int | None = flag(
        None, "largest position the model is built for; at least --seq-length", low=1
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag(
        "learned_absolute", "how positions enter the model"
    )
    rotary_base: int = flag(10000, "base of the rotary frequencies", low=1)
    rotary_percent: float = flag(1.0, "share of a head that rotates", above=0.0, high=1.0)
    rotary_interleaved: bool = flag(False, "rotate neighbouring channels instead of half and half")
    use_rope_scaling: bool = flag(False, "Llama-3.1's scaling of the rotary frequencies")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling", above=0.0)
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind of norm")
    layernorm_epsilon: float = flag(
        1e-5, "added to the variance inside a norm", names=("--norm-epsilon",), above=0.0
    )
    layernorm_zero_centered_gamma: bool = flag(
        False, "store norm gains as their distance from 1", names=("--apply-layernorm-1p",)
    )
    swiglu: bool = flag(False, "gate the MLP with SiLU (else GELU)")
    squared_relu: bool = flag(False, "squared ReLU in the MLP")
    openai_gelu: bool = flag(False, "GELU in its tanh form, as in GPT-2")
    add_bias_linear: bool = flag(
        True, "leave the bias out of every linear layer", off_names=("--disable-bias-linear",)
    )
    add_qkv_bias: bool = flag(False, "a bias on the query, key and value projections only")
    qk_layernorm: bool = flag(False, "normalise queries and keys per head")
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output head its own matrix instead of the token embedding's"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "the vocabulary is padded to a multiple of this", low=1
    )
    hidden_dropout: float = flag(0.1, "dropout on the residual branches", low=0.0, below=1.0)
    attention_dropout: float = flag(0.1, "dropout on attention weights", low=0.0, below=1.0)
    init_method_std: float = flag(
        0.02,
        "standard deviation of initial weights; projections into the residual use std/sqrt(2L)",
        low=0.0,
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = flag(
        "auto",
        "attention kernel; auto = whatever torch picks, unfused and local = plain matrix products",
    )
    attention_softmax_in_fp32: bool = flag(
        False, "softmax of the unfused attention in FP32; the kernels always do so"
    )
    seq_length: int | None = flag(None, "tokens per training sample", low=1)
    num_experts: int | None = flag(
        None, "experts of each layer; its MLP is a single one when not given", low=1
    )
    moe_router_topk: int = flag(2, "experts that a token goes to", low=1)
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert; --ffn-hidden-size when not given", low=1
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of the expert that every token goes to; there is none when not given", low=1
    )
    moe_shared_expert_gate: bool = flag(False, "weigh the shared expert by a sigmoid per token")
    moe_router_norm_topk_prob: bool = flag(
        True,
        "leave the weights of the chosen experts as the softmax over all experts gave them "
        "(else they sum to 1)",
        off_names=("--no-moe-router-norm-topk-prob",),
    )
    moe_router_load_balancing_type: Literal["aux_loss", "none"] = flag(
        "aux_loss", "what keeps experts evenly used"
    )
    moe_aux_loss_coeff: float = flag(0.0, "weight of the load-balancing loss", low=0.0)
    moe_aux_loss_scope: Literal["model", "layer"] = flag(
        "model",
        "tokens that the load-balancing loss pools before its product: those of all layers "
        "(Qwen), or of each layer (Megatron)",
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "an expert takes at most so many times its even share; no token is dropped when not given",
        above=0.0,
    )
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs", "tokens that a full expert keeps: the likeliest, or the first in the batch"
    )
    moe_grouped_gemm: bool = flag(
        False, "one grouped matrix product for all experts, where torch has one for the device"
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """Which tokenizer the ids in the data come from."""

    tokenizer_type: (
        Literal[
            "byte",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "Llama2Tokenizer",
            "NullTokenizer",
        ]
        | None
    ) = flag(None, "kind of tokenizer")
    tokenizer_model: str | None = flag(
        None,
        "local directory or file of the tokenizer; not for byte, GPT2BPETokenizer and "
        "NullTokenizer",
    )
    vocab_file: str | None = flag(None, "vocab.json of the GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges.txt of the GPT2BPETokenizer")
    eod_token: str | None = flag(None, "end-of-document token, where the tokenizer does not say")
    trust_remote_code: bool = flag(False, "run code that comes with a Hugging Face tokenizer")
    vocab_size: int | None = flag(
        None,
        "vocabulary of the NullTokenizer; for other tokenizers the least rows before padding",
        low=1,
    )
    padded_vocab_size: int | None = flag(
        None, "rows of the embedding, instead of the padding rule", low=1
    )
