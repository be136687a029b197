"""Flags of the run's length, optimizer, schedules and number formats.

Owns ``TrainingFlags``, ``OptimizerFlags``, ``ScheduleFlags`` and ``PrecisionFlags``. Invariant: as
in ``config_model``; Muon's defaults follow the paper's recipe and the flag table says so. Tested by
``tests/arguments/test_table.py`` and ``test_validate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Literal

from megamuon.flags import flag
from megamuon.optim.registry import RECIPES
from megamuon.runtime.config import OptimizerSettings, RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Batch, duration, exit, and what happens at the end."""

    micro_batch_size: int | None = flag(None, "samples per rank and forward", low=1)
    global_batch_size: int | None = flag(
        None, "samples per optimizer step; micro batch times ranks when not given", low=1
    )
    train_iters: int | None = flag(None, "optimizer steps over all runs", low=1)
    train_samples: int | None = flag(None, "samples over all runs, instead of --train-iters", low=1)
    exit_interval: int | None = flag(
        None, "save and exit when the iteration is a multiple of this", low=1
    )
    exit_duration_in_mins: int | None = flag(
        None, "save and exit after so many minutes on the slowest rank", low=0
    )
    skip_train: bool = flag(False, "evaluate only")
    seed: int = flag(RuntimeConfig.seed, "seed of initialisation, data order and dropout", low=0)
    deterministic_mode: bool = flag(False, "only kernels that repeat bit for bit")
    manual_gc: bool = flag(False, "turn Python's garbage collector off and collect on schedule")
    manual_gc_interval: int = flag(
        0, "steps between collections with --manual-gc; 0 = none in training", low=0
    )
    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        0, "return cached device memory after a step (1), or also inside it (2)"
    )
    train_sync_interval: int | None = flag(None, "steps between device synchronisations", low=1)
    sample_prompt: str | None = flag(
        None, "print a continuation of this text at the end of the run"
    )
    sample_tokens: int = flag(64, "tokens of the continuation of --sample-prompt", low=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Which optimizer, and what holds for all of them; each brings flags of its own (``optim``)."""

    optimizer: str = flag(
        OptimizerSettings.matrices,
        "optimizer of the matrices, with AdamW for the rest; adam (adamw is the same) and sgd are "
        "for everything",
        choices=lambda: RECIPES,
    )
    weight_decay: float = flag(0.01, "decoupled decay; not on biases and 1-D parameters", low=0.0)
    start_weight_decay: float | None = flag(
        None, "decay at the first step, with --weight-decay-incr-style linear or cosine", low=0.0
    )
    end_weight_decay: float | None = flag(None, "decay at the last step, likewise", low=0.0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "how the decay goes from its start to its end"
    )
    apply_wd_to_qk_layernorm: bool = flag(
        OptimizerSettings.decay_qk_norm, "decay the gains of query and key norms too"
    )
    clip_grad: float = flag(
        OptimizerSettings.clip, "limit of the global gradient norm; 0 = none", low=0.0
    )


def optimizer_flags() -> type[OptimizerFlags]:
    """``OptimizerFlags`` with the fields of every optimizer that is registered now."""
    return _with_fields(tuple(recipe.flags for recipe in RECIPES.values()))


@cache
def _with_fields(classes: tuple[type, ...]) -> type[OptimizerFlags]:
    # Fields of the last base come first: the common ones, then the recipes' in their order.
    bases = (*reversed(list(dict.fromkeys(classes))), OptimizerFlags)
    return make_dataclass("AllOptimizerFlags", [], bases=bases, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Learning rate over the run; Megatron's formulas."""

    lr: float | None = flag(None, "peak learning rate", above=0.0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", low=0.0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay"
    )
    lr_decay_iters: int | None = flag(
        None, "steps of the decay; --train-iters when not given", low=1
    )
    lr_decay_samples: int | None = flag(
        None, "samples of the decay; --train-samples when not given", low=1
    )
    lr_warmup_iters: int = flag(0, "steps of linear warmup", low=0)
    lr_warmup_samples: int = flag(0, "samples of linear warmup", low=0)
    lr_warmup_fraction: float | None = flag(
        None, "warmup as a share of the decay", low=0.0, below=1.0
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warmup", low=0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of the final anneal of WSD"
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of the final anneal of WSD", low=1)
    decoupled_lr: float | None = flag(
        None, "peak learning rate of embedding and output head; --lr when not given", above=0.0
    )
    decoupled_min_lr: float | None = flag(None, "end of the decay of --decoupled-lr", low=0.0)
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume, the schedule of the command line instead of the checkpoint's",
        names=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, the schedule of the checkpoint whatever the command line says",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Number formats; FP32 compute when neither bf16 nor fp64 is given.  Masters are FP32 (FP64
    with --fp64).
    """

    bf16: bool = flag(False, "compute and gather in BF16 with FP32 masters")
    fp64: bool = flag(False, "everything in FP64, masters included: for equivalence tests")
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in BF16 instead of FP32")
    gather_in_bf16: bool = flag(
        False, "gather and publish weights in BF16 where the arithmetic stays FP32"
    )
