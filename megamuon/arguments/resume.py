"""Comparison of flags with those of the checkpoint that a run resumes from.

Owns the list of flags that may change, each group with its reason; every other flag, a new one
included, is compared.  Pure: a stored configuration and a present one in, differences out.  Tested
by ``tests/arguments/test_resume.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamuon.arguments.config import Config, specs_by_dest
from megamuon.arguments.printing import config_to_nested
from megamuon.optim.registry import RECIPES, flags_of, flags_of_all

Stored = Mapping[str, Mapping[str, Any]]  # component -> dest -> value, as config_to_nested makes it

# Reason -> the flags that may change for it.
MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "a preset: the flags that it sets are compared": ("model", "line"),
    "the rows of the token table are compared as shapes, and the tokenizer by what it does": (
        *("make_vocab_size_divisible_by", "vocab_size", "padded_vocab_size"),
        *("tokenizer_model", "vocab_file", "merge_file", "eod_token", "trust_remote_code"),
    ),
    "where data lies: its contents, shares and splits are compared by digest": (
        *("data_path", "train_data_path", "valid_data_path", "test_data_path", "split"),
    ),
    "how data is read, not which": (
        *("data_cache_path", "mmap_bin_files", "num_dataset_builder_threads"),
        "dataloader_fast_cache_load",
    ),
    "the saved schedule is compared, field by field": (
        *("train_iters", "train_samples", "lr", "min_lr", "lr_decay_style", "lr_decay_iters"),
        *("lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
        *("lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "decoupled_lr"),
        *("decoupled_min_lr", "weight_decay", "start_weight_decay", "end_weight_decay"),
        "weight_decay_incr_style",
    ),
    "says what becomes of the saved schedule": (
        *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    ),
    "state of another optimizer is left out, and the log says how much": ("optimizer",),
    "another kernel for the same function": (
        *("attention_backend", "attention_softmax_in_fp32", "moe_grouped_gemm"),
        *("muon_fp32_matmul_prec", "deterministic_mode", "ns_form", "ns_restarts"),
    ),
    "how the work lies on the ranks; checkpoints have no layout": (
        *("micro_batch_size", "sharding", "shard_size", "zero_stage", "publish"),
        *("tensor_model_parallel_size", "sequence_parallel", "gradient_reduction"),
        *("param_layout", "collectives", "matrix_update", "fabric", "ring_slots", "chunk_kib"),
        *("publish_tile_kib", "collective_deadline", "owner_planner", "owner_unit_threshold"),
        *("merge_experts", "owner_byte_cap", "owner_layer_spreading", "owner_column_balance"),
        *("ns_cost", "ns_cost_file", "ns_cost_cache", "distributed_backend"),
        "distributed_timeout_minutes",
    ),
    "what is computed again, not what": (
        *("recompute_granularity", "recompute_method", "recompute_num_layers"),
        "recompute_modules",
    ),
    "when the run leaves, and what it does beside the steps": (
        *("exit_interval", "exit_duration_in_mins", "skip_train", "manual_gc"),
        *("manual_gc_interval", "empty_unused_memory_level", "train_sync_interval"),
        *("sample_prompt", "sample_tokens", "exit_signal_handler", "exit_signal"),
    ),
    "what is done about faults; consumed samples and skipped steps are counted": (
        *("iterations_to_skip", "save_failure", "max_skipped_iterations", "max_failed_saves"),
    ),
    "what this launch saves and loads": (
        *("save", "load", "exit_on_missing_checkpoint", "save_interval", "save_retain_interval"),
        *("ckpt_step", "no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng"),
        *("finetune", "pretrained_checkpoint", "use_checkpoint_args", "async_save"),
        *("log_progress", "override_checkpoint_args", "reuse_save_directory"),
    ),
    "how much is evaluated and when: the position in the validation set is saved": (
        *("eval_iters", "eval_interval", "start_eval_at_iter", "eval_global_batch_size"),
        "eval_micro_batch_size",
    ),
    "what is printed and recorded": (
        *("log_interval", "log_throughput", "log_params_norm", "log_num_zeros_in_grad"),
        *("timing_log_level", "timing_log_option", "tensorboard_dir", "tensorboard_log_interval"),
        *("tensorboard_queue_size", "log_timers_to_tensorboard", "log_memory_to_tensorboard"),
        *("log_memory_interval", "log_validation_ppl_to_tensorboard"),
        *("log_world_size_to_tensorboard", "log_loss_scale_to_tensorboard", "wandb_project"),
        *("wandb_exp_name", "wandb_entity", "wandb_save_dir", "logging_level", "progress"),
        *("profile", "profile_step_start", "profile_step_end", "profile_ranks"),
        *("use_pytorch_profiler", "record_memory_history", "memory_snapshot_path"),
    ),
}
FREE = frozenset(dest for dests in MAY_CHANGE.values() for dest in dests)

# Flags that describe the function that the weights are of, and not how they are trained.
MODEL = "model"
OF_TRAINING = frozenset({"hidden_dropout", "attention_dropout", "init_method_std", "seq_length"})

# What is compared by its digest, under the name of the flag that says where it lies.
DIGESTS: Mapping[str, str] = {
    "tokenizer": "tokenizer_model",
    "training data": "data_path",
    "validation data": "valid_data_path",
}

# Flags that decide in which order which samples come: a changed one begins a new order.
OF_THE_ORDER = frozenset(
    {"seed", "seq_length", "shuffle", "dataloader_type", "mock_data", "mid_level_dataset_surplus"}
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A flag that is not what it was when the checkpoint was written."""

    dest: str
    stored: Any
    present: Any

    def __str__(self) -> str:
        flag = specs_by_dest()[self.dest].flag
        return (
            f"{self.dest} is {self.stored!r} in the checkpoint and {self.present!r} here ({flag})"
        )


def compared() -> frozenset[str]:
    """The flags whose values are compared."""
    return frozenset(specs_by_dest()) - FREE


def overridable() -> frozenset[str]:
    """What --override-checkpoint-args may name."""
    return compared() | frozenset(DIGESTS.values())


def differences(
    stored: Stored, config: Config, *, without: tuple[str, ...] = ()
) -> list[Difference]:
    """Every compared flag with another value than ``stored`` has, in the order of the fields.

    ``without`` names components that do not count.  A flag that ``stored`` lacks is new since and
    is left out, as is a flag of an optimizer that one of the two does not use.
    """
    present = config_to_nested(config)
    optimizers = (
        stored.get("optimizer", {}).get("optimizer", config.optimizer.optimizer),
        config.optimizer.optimizer,
    )
    found = []
    for dest, spec in specs_by_dest().items():
        old = stored.get(spec.component, {})
        if dest in FREE or spec.component in without or dest not in old:
            continue
        new = present[spec.component][dest]
        if old[dest] != new and _in_use(dest, optimizers):
            found.append(Difference(dest=dest, stored=old[dest], present=new))
    return found


def model_differences(stored: Stored, config: Config) -> list[Difference]:
    """Those of ``differences`` that change what the weights compute."""
    return [
        difference
        for difference in differences(stored, config)
        if specs_by_dest()[difference.dest].component == MODEL
        and difference.dest not in OF_TRAINING
    ]


def _in_use(dest: str, optimizers: tuple[str, str]) -> bool:
    """Whether both optimizers read the flag; one that belongs to none is read by all."""
    known = [name for name in optimizers if name in RECIPES]
    return dest not in flags_of_all() or all(dest in flags_of(name) for name in known)
