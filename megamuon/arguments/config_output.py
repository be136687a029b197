"""Flags of everything a run writes: checkpoints, logs and profiles.

Owns ``CheckpointFlags``, ``LoggingFlags`` and ``ProfilingFlags``. Invariant: as in
``config_model``. Tested by ``tests/arguments/test_validate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megamuon.flags import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Saving and loading."""

    save: str | None = flag(None, "directory to save checkpoints in")
    reuse_save_directory: bool = flag(
        False,
        "save where checkpoints of another run lie: those of the same iteration are replaced, the "
        "others stay, and the newest is from then on this run's",
    )
    load: str | None = flag(
        None, "directory to load a checkpoint from; random weights if it has none"
    )
    exit_on_missing_checkpoint: bool = flag(False, "exit with status 1 if --load has no checkpoint")
    save_interval: int | None = flag(
        None,
        "steps between checkpoints; required with --save",
        names=("--save-interval", "--persistent-save-interval"),
        low=1,
    )
    save_retain_interval: int | None = flag(
        None,
        "keep the multiples of this, the newest checkpoint, and the newest from which a step was "
        "made; a multiple of --save-interval",
        low=1,
    )
    ckpt_step: int | None = flag(None, "load this iteration instead of the newest", low=0)
    no_save_optim: bool = flag(False, "leave optimizer state out of checkpoints")
    no_save_rng: bool = flag(False, "leave random-number state out of checkpoints")
    no_load_optim: bool = flag(False, "do not load optimizer state and schedule")
    no_load_rng: bool = flag(False, "do not load random-number state")
    finetune: bool = flag(False, "load weights only and start from iteration 0")
    pretrained_checkpoint: str | None = flag(
        None, "weights to start from (as --finetune) if --load has no checkpoint"
    )
    use_checkpoint_args: bool = flag(
        False, "model and tokenizer flags from the checkpoint; explicit flags win"
    )
    override_checkpoint_args: tuple[str, ...] | None = flag(
        None,
        "on resume, names of flags (such as seed clip_grad) whose value may differ from the "
        "checkpoint's; the command line's is taken",
    )
    async_save: bool = flag(
        False, "write checkpoints while training goes on; needs no further flag"
    )
    log_progress: bool = flag(False, "append starts and saves to progress.txt in --save")


@dataclass(frozen=True, kw_only=True)
class LoggingFlags:
    """Log lines, TensorBoard and Weights & Biases."""

    log_interval: int = flag(100, "steps between log lines", low=1)
    log_throughput: bool = flag(False, "TFLOP/s per device and tokens per second in the log line")
    log_params_norm: bool = flag(False, "global L2 norm of the parameters in the log line")
    log_num_zeros_in_grad: bool = flag(False, "number of zero gradients in the log line")
    timing_log_level: Literal[0, 1, 2] = flag(0, "timers: the step only, coarse phases, or all")
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", "how the timers of all ranks are summarised"
    )
    tensorboard_dir: str | None = flag(None, "directory of TensorBoard's event files")
    tensorboard_log_interval: int = flag(1, "steps between scalars", low=1)
    tensorboard_queue_size: int = flag(1000, "scalars held back before a flush", low=1)
    log_timers_to_tensorboard: bool = flag(False, "timers and throughput as scalars")
    log_memory_to_tensorboard: bool = flag(False, "device memory as scalars")
    log_memory_interval: int | None = flag(
        None, "steps between memory lines; a multiple of --log-interval", low=1
    )
    log_validation_ppl_to_tensorboard: bool = flag(False, "validation perplexity as a scalar")
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks as a scalar")
    log_loss_scale_to_tensorboard: bool = flag(True, "leave out the loss-scale scalar")
    wandb_project: str | None = flag(None, "Weights & Biases project; turns it on")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name")
    wandb_entity: str | None = flag(None, "Weights & Biases team")
    wandb_save_dir: str | None = flag(
        None, "local directory of Weights & Biases; wandb, inside --save if given, when not given"
    )
    logging_level: int | None = flag(None, "level of Python's logging", low=0)
    progress: Literal["auto", "on", "off"] = flag(
        "auto", "one live line with step, loss, tokens/s and remaining time; auto = on a terminal"
    )


@dataclass(frozen=True, kw_only=True)
class ProfilingFlags:
    """Profilers and memory snapshots."""

    profile: bool = flag(
        False,
        "mark the profiled steps for an external CUDA profiler, or see --use-pytorch-profiler",
    )
    profile_step_start: int = flag(10, "first profiled step, counted from 1", low=0)
    profile_step_end: int = flag(12, "last profiled step", low=1)
    profile_ranks: tuple[int, ...] = flag((), "profiled ranks; all when not given", low=0)
    use_pytorch_profiler: bool = flag(
        False, "PyTorch's own profiler, with --profile; its trace goes to --tensorboard-dir"
    )
    record_memory_history: bool = flag(False, "record device allocations and write a snapshot")
    memory_snapshot_path: str = flag("snapshot.pickle", "file of the snapshot, one per rank")
