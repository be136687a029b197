"""Checks of recompute, checkpoints, data, tokenizer, logs, profiles and exits.

Invariant: every check is a pure function of the resolved configuration that returns *all* its
problems, one line each with the flag, its value and what to change; no check raises, prints or
changes anything. Rules: Megatron's argument validation, with its silent downgrades turned into
problems. Tested by ``tests/arguments/test_validate.py``.
"""

from __future__ import annotations

import difflib
import re

from megamuon.arguments.config import Config, specs_by_dest
from megamuon.arguments.resume import overridable
from megamuon.arguments.run_context import RunContext


def check_recompute(config: Config, context: RunContext) -> list[str]:
    """Which recompute flags go together."""
    recompute, problems = config.recompute, []
    kind, method, layers = (
        recompute.recompute_granularity,
        recompute.recompute_method,
        recompute.recompute_num_layers,
    )
    if kind != "full":
        hint = f"--recompute-granularity is {kind}; use full"
        if method is not None:
            problems.append(f"--recompute-method {method}: {hint}")
        if layers is not None:
            problems.append(f"--recompute-num-layers {layers}: {hint}")
    else:
        if method is None and "recompute_method" not in context.unusable:
            problems.append(
                "--recompute-granularity full: needs --recompute-method uniform or block"
            )
        if layers is None and "recompute_num_layers" not in context.unusable:
            problems.append("--recompute-granularity full: needs --recompute-num-layers")
        if layers is not None and config.model.num_layers and layers > config.model.num_layers:
            problems.append(
                f"--recompute-num-layers {layers}: above --num-layers {config.model.num_layers}"
            )
    if recompute.recompute_modules is not None and kind != "selective":
        problems.append(
            f"--recompute-modules {' '.join(recompute.recompute_modules)}: "
            f"--recompute-granularity is {kind}; "
            "use selective"
        )
    return problems


def check_saving(config: Config, context: RunContext) -> list[str]:
    """Flags that need --save, and the intervals."""
    checkpoint, problems = config.checkpoint, []
    interval, retain = checkpoint.save_interval, checkpoint.save_retain_interval
    if checkpoint.save is not None and interval is None and "save_interval" not in context.unusable:
        problems.append(f"--save {checkpoint.save}: needs --save-interval")
    if interval and retain is not None and retain % interval:
        problems.append(
            f"--save-retain-interval {retain}: must be a multiple of --save-interval {interval}"
        )
    if checkpoint.save is None:
        needing = {
            "--save-interval": interval,
            "--save-retain-interval": retain,
            "--no-save-optim": checkpoint.no_save_optim,
            "--no-save-rng": checkpoint.no_save_rng,
            "--async-save": checkpoint.async_save,
            "--log-progress": checkpoint.log_progress,
            "--reuse-save-directory": checkpoint.reuse_save_directory,
        }
        problems += [
            f"{flag}: has no effect without --save; add it"
            for flag, value in needing.items()
            if value
        ]
    return problems


def check_loading(config: Config, context: RunContext) -> list[str]:
    """Flags that need --load, and those that contradict each other."""
    checkpoint, problems = config.checkpoint, []
    if checkpoint.load is None:
        needing = {
            "--ckpt-step": checkpoint.ckpt_step is not None,
            "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
        }
        problems += [
            f"{flag}: has no effect without --load; add it"
            for flag, value in needing.items()
            if value
        ]
        if checkpoint.pretrained_checkpoint is None:
            needing = {
                "--no-load-optim": checkpoint.no_load_optim,
                "--no-load-rng": checkpoint.no_load_rng,
                "--finetune": checkpoint.finetune,
            }
            problems += [
                f"{flag}: has no effect without --load or --pretrained-checkpoint; add one"
                for flag, value in needing.items()
                if value
            ]
    problems += _check_overrides(config)
    if checkpoint.finetune and config.schedule.use_checkpoint_opt_param_scheduler:
        problems.append(
            "--use-checkpoint-opt_param-scheduler: --finetune starts a new schedule; drop one of "
            "the two"
        )
    return problems


def _check_overrides(config: Config) -> list[str]:
    """--override-checkpoint-args names flags that a resume compares."""
    names = config.checkpoint.override_checkpoint_args
    if names is None:
        return []
    said = f"--override-checkpoint-args {' '.join(names)}"
    if config.checkpoint.load is None:
        return [f"{said}: has no effect without --load; add it"]
    if config.checkpoint.finetune:
        return [f"{said}: --finetune takes weights alone and compares no flags; drop one of them"]
    problems = []
    for name in names:
        if name in overridable():
            continue
        reason = "is no flag" if name not in specs_by_dest() else "may change without it"
        near = difflib.get_close_matches(name.replace("-", "_").strip("_"), overridable(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"--override-checkpoint-args {name}: {reason}{hint}")
    return problems


def check_data(config: Config, context: RunContext) -> list[str]:
    """Exactly one source of samples, and a split that can be read."""
    data, problems = config.data, []
    parts = {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    given_parts = [flag for flag, value in parts.items() if value]
    sources = [
        flag
        for flag, value in (("--data-path", data.data_path), ("--mock-data", data.mock_data))
        if value
    ]
    sources += given_parts[:1]
    if not sources:
        problems.append(
            "--data-path: required and not given (or --train-data-path, or --mock-data)"
        )
    if len(sources) > 1:
        problems.append(f"{' and '.join(sources)}: give one of them")
    if given_parts and data.split is not None:
        problems.append(f"--split {data.split}: has no effect on {given_parts[0]}; remove it")
    if given_parts and not data.train_data_path and not config.training.skip_train:
        problems.append(f"{given_parts[0]}: needs --train-data-path beside it (or --skip-train)")
    if data.split is not None:
        shares = re.split(r"[,/\s]+", data.split.strip())
        # The data room takes runs of digits and points: 1e2 would be two shares there.
        plain = all(re.fullmatch(r"\d+\.?\d*|\.\d+", share) for share in shares)
        if not plain or len(shares) > 3 or not sum(map(float, shares)) > 0:
            problems.append(f"--split {data.split}: must be one to three shares such as 969,30,1")
    return problems


def check_tokenizer(config: Config, context: RunContext) -> list[str]:
    """What each tokenizer needs."""
    tokenizer, problems = config.tokenizer, []
    kind, model = tokenizer.tokenizer_type, tokenizer.tokenizer_model
    local = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
    if kind in local and model is None:
        problems.append(f"--tokenizer-type {kind}: needs --tokenizer-model")
    if kind is not None and kind not in local and model is not None:
        problems.append(
            f"--tokenizer-model {model}: --tokenizer-type {kind} has no model; remove it"
        )
    for flag, value in (
        ("--vocab-file", tokenizer.vocab_file),
        ("--merge-file", tokenizer.merge_file),
    ):
        if kind == "GPT2BPETokenizer" and value is None:
            problems.append(f"--tokenizer-type {kind}: needs {flag}")
        if kind not in (None, "GPT2BPETokenizer") and value is not None:
            problems.append(f"{flag} {value}: --tokenizer-type {kind} has no such file; remove it")
    if (
        kind == "NullTokenizer"
        and tokenizer.vocab_size is None
        and "vocab_size" not in context.unusable
    ):
        problems.append("--tokenizer-type NullTokenizer: needs --vocab-size")
    if kind in ("byte", "NullTokenizer") and tokenizer.eod_token is not None:
        problems.append(
            f"--eod-token {tokenizer.eod_token}: --tokenizer-type {kind} has its own; remove it"
        )
    padded, size = tokenizer.padded_vocab_size, tokenizer.vocab_size
    if padded is not None and size is not None and padded < size:
        problems.append(f"--padded-vocab-size {padded}: below --vocab-size {size}")
    return problems


def check_logging(config: Config, context: RunContext) -> list[str]:
    """Scalars need a writer; intervals must fit."""
    logging, problems = config.logging, []
    memory = logging.log_memory_interval
    if memory is not None and logging.log_interval > 0 and memory % logging.log_interval:
        problems.append(
            f"--log-memory-interval {memory}: must be a multiple of --log-interval "
            f"{logging.log_interval}"
        )
    if logging.wandb_project is None:
        for dest in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if getattr(logging, dest) is not None:
                problems.append(
                    f"--{dest.replace('_', '-')} {getattr(logging, dest)}: needs --wandb-project"
                )
    if logging.tensorboard_dir is None and logging.wandb_project is None:
        for dest in sorted(context.explicit):
            if dest.endswith("_to_tensorboard") and getattr(logging, dest):
                problems.append(
                    f"--{dest.replace('_', '-')}: needs --tensorboard-dir or --wandb-project"
                )
    return problems


def check_profiling(config: Config, context: RunContext) -> list[str]:
    """The profiled range and ranks must exist."""
    profiling, problems = config.profiling, []
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if start >= end:
        problems.append(f"--profile-step-start {start}: must be below --profile-step-end {end}")
    if profiling.use_pytorch_profiler and not profiling.profile:
        problems.append("--use-pytorch-profiler: has no effect without --profile; add it")
    if profiling.use_pytorch_profiler and config.logging.tensorboard_dir is None:
        problems.append("--use-pytorch-profiler: writes its trace to --tensorboard-dir; add it")
    problems += [
        f"--profile-ranks {rank}: there are {context.world_size} ranks, numbered from 0"
        for rank in profiling.profile_ranks
        if rank >= context.world_size
    ]
    if "memory_snapshot_path" in context.explicit and not profiling.record_memory_history:
        problems.append(
            f"--memory-snapshot-path {profiling.memory_snapshot_path}: needs "
            "--record-memory-history"
        )
    return problems


def check_exit(config: Config, context: RunContext) -> list[str]:
    """A signal needs somebody who listens, and a bound something that it bounds."""
    if "max_failed_saves" in context.explicit and config.fault.save_failure != "warn":
        return [f"--max-failed-saves {config.fault.max_failed_saves}: needs --save-failure warn"]
    if "exit_signal" in context.explicit and not config.fault.exit_signal_handler:
        return [f"--exit-signal {config.fault.exit_signal}: needs --exit-signal-handler"]
    return []
