"""Every choice of every flag starts: one step of a model with one layer, by ``main`` itself.

The list comes from the flags' own declarations, so that a new choice is tried without a word here,
and fails here where it needs other flags that ``WITH`` does not give. Choices that a CPU cannot run
end with the line that ``REFUSED`` expects.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import pretrain_gpt
from megamuon.arguments import specs_by_dest
from tests.support.training import LOG_LINE

SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 12,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "tokenizer_type": "byte",
    "make_vocab_size_divisible_by": 1,
    "data_path": "@corpus",
    "split": "80,10,10",
    "micro_batch_size": 1,
    "train_iters": 2,
    "lr": 1e-2,
    "log_interval": 1,
    "eval_iters": 1,
    "ns_cost": "closed-form",
}
# What a flag, or one of its choices, needs beside it. "@name" is a path that the fixture makes.
LONG = {"seq_length": 512, "max_position_embeddings": 512}
ROPE = {"position_embedding_type": "rope"}
SCALARS = {"tensorboard_dir": "@scalars"}
SAVE = {"save": "@save", "save_interval": 1}
RESUME = {"load": "@saved", "train_iters": 3, "override_opt_param_scheduler": True}
RAMP = {"start_weight_decay": 0.0, "end_weight_decay": 0.1}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
EXPERTS = {"num_experts": 4, "swiglu": True, "add_bias_linear": False}
WITH: dict[Any, dict[str, Any]] = {
    ("attention_backend", "flash"): {"attention_dropout": 0.0},  # CPUs have no kernel with dropout
    "group_query_attention": {"num_query_groups": 1},
    "rotary_interleaved": ROPE,
    "use_rope_scaling": ROPE,
    "attention_softmax_in_fp32": {"attention_backend": "unfused", "bf16": True},
    ("tokenizer_type", "HuggingFaceTokenizer"): {"tokenizer_model": "@huggingface"},
    ("tokenizer_type", "GPT2BPETokenizer"): {"vocab_file": "@vocab", "merge_file": "@merges"},
    ("tokenizer_type", "SentencePieceTokenizer"): {"tokenizer_model": "@sentencepiece"},
    ("tokenizer_type", "Llama2Tokenizer"): {"tokenizer_model": "@sentencepiece"},
    ("tokenizer_type", "NullTokenizer"): {"vocab_size": 20},
    "trust_remote_code": {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "@huggingface",
    },
    "mock_data": LONG | {"data_path": None, "split": None},  # a fixed epoch of 68 million tokens
    ("weight_decay_incr_style", "linear"): RAMP,
    ("weight_decay_incr_style", "cosine"): RAMP,
    "apply_wd_to_qk_layernorm": {"qk_layernorm": True},
    ("lr_decay_style", "WSD"): WSD,
    ("lr_decay_style", "inverse-square-root"): {"lr_warmup_iters": 1},
    "lr_wsd_decay_style": WSD,
    "override_opt_param_scheduler": RESUME,
    "use_checkpoint_opt_param_scheduler": RESUME | {"override_opt_param_scheduler": None},
    "grad_reduce_in_bf16": {"bf16": True},
    ("param_layout", "even"): {"optimizer": "adam"},
    ("collectives", "fsdp2"): {
        "optimizer": "adam",
        "param_layout": "even",
        "matrix_update": "none",
    },
    ("matrix_update", "gather"): {"param_layout": "even"},
    ("matrix_update", "none"): {"optimizer": "adam"},
    "merge_experts": EXPERTS,
    "moe_shared_expert_gate": EXPERTS | {"moe_shared_expert_intermediate_size": 8},
    "moe_router_norm_topk_prob": EXPERTS,
    "moe_router_load_balancing_type": EXPERTS,
    "moe_aux_loss_scope": EXPERTS | {"moe_aux_loss_coeff": 0.1},
    "moe_token_drop_policy": EXPERTS | {"moe_expert_capacity_factor": 1.0},
    "moe_grouped_gemm": EXPERTS,
    "shampoo_grafting": {"optimizer": "shampoo"},
    "soap_variant": {"optimizer": "soap"},
    ("ns_cost", "file"): {"ns_cost_file": "@times"},
    ("ns_cost", "measured"): {"ns_cost_cache": "@cache"},
    ("recompute_granularity", "full"): FULL | {"recompute_method": "uniform"},
    "recompute_method": FULL,
    "recompute_modules": {"recompute_granularity": "selective"},
    "exit_on_missing_checkpoint": RESUME,
    "no_save_optim": SAVE,
    "no_save_rng": SAVE,
    "no_load_optim": RESUME,
    "no_load_rng": RESUME,
    "finetune": RESUME,
    "use_checkpoint_args": RESUME,
    "async_save": SAVE,
    "log_progress": SAVE,
    "reuse_save_directory": SAVE,
    "save_failure": SAVE,
    "log_timers_to_tensorboard": SCALARS,
    "log_memory_to_tensorboard": SCALARS,
    "log_validation_ppl_to_tensorboard": SCALARS,
    "log_world_size_to_tensorboard": SCALARS,
    "log_loss_scale_to_tensorboard": SCALARS,
    "use_pytorch_profiler": SCALARS
    | {"profile": True, "profile_step_start": 1, "profile_step_end": 2},
    "exit_signal": {"exit_signal_handler": True},
}
# What cannot start on a CPU, and the line that says so.
REFUSED = {
    ("attention_backend", "fused"): "attention_backend fused needs a GPU, not cpu; use auto",
    ("distributed_backend", "nccl"): "--distributed-backend nccl needs one",
    ("fabric", "nccl"): "--fabric nccl",
    ("profile", True): "--profile on cpu needs --use-pytorch-profiler",
    ("record_memory_history", True): "--record-memory-history records CUDA's allocator",
}


def choices() -> list[tuple[str, Any]]:
    """Flag and value: all choices, and both values of a switch that has both spellings."""
    found: list[tuple[str, Any]] = []
    for dest, spec in specs_by_dest().items():
        if spec.choices:
            found += [(dest, choice) for choice in spec.choices]
        elif spec.value_type is bool:
            found += [(dest, True)] * bool(spec.names) + [(dest, False)] * bool(spec.off_names)
    return found


def words_of(values: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for dest, value in values.items():
        spec = specs_by_dest()[dest]
        if value is None:
            continue
        if spec.value_type is bool:
            words.append((spec.names if value else spec.off_names)[0])
        else:
            words += [spec.flag, str(value)]
    return words


def make_tokenizers(folder: Path) -> None:
    import sentencepiece
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    text = ["the quick brown fox jumps over the lazy dog", "pack my box with jugs"] * 20
    byte_pairs = tokenizers.ByteLevelBPETokenizer()
    byte_pairs.train_from_iterator(text, vocab_size=280, special_tokens=["<|endoftext|>"])
    byte_pairs.save_model(str(folder))  # vocab.json and merges.txt
    PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs._tokenizer, eos_token="<|endoftext|>"
    ).save_pretrained(folder / "huggingface")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(folder / "pieces"),
        vocab_size=34,
        hard_vocab_limit=False,
        minloglevel=2,
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What "@name" stands for, but for what a test writes itself."""
    from tests.support.corpora import write_corpus

    folder = tmp_path_factory.mktemp("choices")
    make_tokenizers(folder)
    write_corpus(folder / "corpus", [[n % 20 for n in range(60)]] * 20)
    shapes = [(rows, cols) for rows in (12, 16) for cols in (12, 16)]
    (folder / "times.json").write_text(json.dumps([[shape, 1.0] for shape in shapes]))
    save = {"save": folder / "saved", "save_interval": 2}
    first = SMALL | {"data_path": folder / "corpus"}
    assert pretrain_gpt.main(words_of(first | save)) == 0
    return {
        "corpus": folder / "corpus",
        "huggingface": folder / "huggingface",
        "vocab": folder / "vocab.json",
        "merges": folder / "merges.txt",
        "sentencepiece": folder / "pieces.model",
        "times": folder / "times.json",
        "saved": folder / "saved",
    }


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo what a run may set for its process."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    gc.enable()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("dest", "value"), choices())
def test_it_starts(
    dest: str,
    value: Any,
    paths: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    companions = WITH.get((dest, value), WITH.get(dest, {}))
    values = SMALL | companions | {dest: value}
    for name, given in values.items():
        if isinstance(given, str) and given.startswith("@"):
            values[name] = paths.get(given[1:], tmp_path / given[1:])
    code = pretrain_gpt.main(words_of(values))
    captured = capsys.readouterr()
    if (dest, value) in REFUSED:
        (line,) = captured.err.splitlines()
        assert code == 1 and REFUSED[dest, value] in line
        return
    assert code == 0, captured.err
    if dest == "skip_train":
        assert " validation loss at iteration 0 on validation set | lm loss value:" in captured.out
    else:
        assert LOG_LINE.search(captured.out), captured.out[-2000:]


def test_the_tables_name_choices_that_exist() -> None:
    known = {*choices(), *(dest for dest, _ in choices())}
    assert set(WITH) | set(REFUSED) <= known
