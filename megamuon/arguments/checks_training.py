"""Checks of the model, the batch, the length of the run, schedules, optimizer and precision.

Invariant: every check is a pure function of the resolved configuration that returns *all* its
problems, one line each with the flag, its value and what to change; no check raises, prints or
changes anything. Rules: Megatron's argument validation, with its silent downgrades turned into
problems. Tested by ``tests/arguments/test_validate.py``.
"""

from __future__ import annotations

from typing import Any

from megamuon.arguments.config import Config, specs_by_dest, values_from_config
from megamuon.arguments.derive import sample_ranks
from megamuon.arguments.run_context import RunContext


def _missing(flag: str, context: RunContext, dest: str, value: Any) -> list[str]:
    if value is None and dest not in context.unusable:
        return [f"{flag}: required and not given"]
    return []


def check_required(config: Config, context: RunContext) -> list[str]:
    """Flags without which nothing can start."""
    problems = []
    for dest in (
        "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"
    ):  # fmt: skip
        flag = specs_by_dest()[dest].flag
        hint = [
            line + ("" if dest == "seq_length" else " (or name a preset with --model)")
            for line in _missing(flag, context, dest, getattr(config.model, dest))
        ]
        problems += hint
    problems += _missing(
        "--micro-batch-size", context, "micro_batch_size", config.training.micro_batch_size
    )
    problems += _missing(
        "--tokenizer-type", context, "tokenizer_type", config.tokenizer.tokenizer_type
    )
    if config.training.skip_train:
        return problems
    lengths = {"train_iters", "train_samples"}
    none_given = config.training.train_iters is None and config.training.train_samples is None
    if none_given and not lengths & context.unusable:
        problems.append(
            "--train-iters: required and not given (or --train-samples, or --skip-train)"
        )
    return problems + _missing("--lr", context, "lr", config.schedule.lr)


def check_bounds(config: Config, context: RunContext) -> list[str]:
    """Ranges declared at the fields."""
    problems = []
    values = values_from_config(config)
    for dest, spec in specs_by_dest().items():
        items = values[dest] if spec.many else (values[dest],)
        low, high, above, below = spec.bounds
        for item in items or ():
            if item is None or isinstance(item, str) or dest in context.unusable:
                continue
            rules = (
                (low is None or item >= low, f"at least {low}"),
                (high is None or item <= high, f"at most {high}"),
                (above is None or item > above, f"above {above}"),
                (below is None or item < below, f"below {below}"),
                (item == item and abs(item) != float("inf"), "finite"),
            )
            problems += [
                f"{spec.flag} {item}: must be {rule}" for holds, rule in rules if not holds
            ]
    return problems


def check_shape(config: Config, context: RunContext) -> list[str]:
    """Divisibility and position limits of the architecture."""
    model, problems = config.model, []
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    if hidden and heads and model.kv_channels is None:
        problems.append(
            f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}; change one, "
            "or give --kv-channels"
        )
    if heads and not model.group_query_attention and groups not in (1, heads):
        problems.append(
            f"--num-query-groups {groups}: has no effect without --group-query-attention; add it"
        )
    elif heads and groups > 0 and heads % groups:
        problems.append(
            f"--num-query-groups {groups}: does not divide --num-attention-heads {heads}"
        )
    activations = [
        specs_by_dest()[dest].flag
        for dest in ("swiglu", "squared_relu", "openai_gelu")
        if getattr(model, dest)
    ]
    if len(activations) > 1:
        problems.append(f"{' and '.join(activations)}: give one of them")
    if model.position_embedding_type == "rope" and model.kv_channels and model.kv_channels % 2:
        problems.append(
            f"--kv-channels {model.kv_channels}: must be even with --position-embedding-type rope"
        )
    length, limit = model.seq_length, model.max_position_embeddings
    if length and limit and length > limit:
        problems.append(
            f"--seq-length {length}: above --max-position-embeddings {limit}; raise the latter"
        )
    return problems


def check_positions(config: Config, context: RunContext) -> list[str]:
    """Rotary flags, and masks that a kernel cannot take."""
    model, problems = config.model, []
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        problems.append("--use-rope-scaling: needs --position-embedding-type rope")
    if "rope_scaling_factor" in context.explicit and not model.use_rope_scaling:
        problems.append(
            f"--rope-scaling-factor {model.rope_scaling_factor}: has no effect without "
            "--use-rope-scaling; add it"
        )
    if config.data.reset_attention_mask and model.attention_backend == "flash":
        problems.append(
            "--reset-attention-mask and --attention-backend flash: the flash kernel takes no mask; "
            "use --attention-backend auto"
        )
    return problems


def _check_batch(kind: str, batch: int | None, micro: int | None, world: int) -> list[str]:
    if batch is None or micro is None or micro < 1 or batch < 1 or batch % (micro * world) == 0:
        return []
    return [
        f"--{kind}global-batch-size {batch}: not a multiple of --{kind}micro-batch-size {micro} "
        f"times {world} data-parallel ranks; "
        f"use a multiple of {micro * world}"
    ]


def check_batches(config: Config, context: RunContext) -> list[str]:
    """Global batches must be whole numbers of micro-batches on every rank."""
    training, validation = config.training, config.validation
    ranks = sample_ranks(config.parallel.tensor_model_parallel_size, context.world_size)
    problems: list[str] = []
    if ranks is not None:  # else that is a problem of its own
        problems += _check_batch("", training.global_batch_size, training.micro_batch_size, ranks)
    if ranks is not None and context.explicit & {"eval_global_batch_size", "eval_micro_batch_size"}:
        problems += _check_batch(
            "eval-", validation.eval_global_batch_size, validation.eval_micro_batch_size, ranks
        )
    if training.manual_gc_interval and not training.manual_gc:
        problems.append(
            f"--manual-gc-interval {training.manual_gc_interval}: has no effect without "
            "--manual-gc; add it"
        )
    if "sample_tokens" in context.explicit and training.sample_prompt is None:
        problems.append(f"--sample-tokens {training.sample_tokens}: needs --sample-prompt")
    return problems


def check_duration(config: Config, context: RunContext) -> list[str]:
    """Iterations or samples, never both."""
    training, schedule, problems = config.training, config.schedule, []
    if training.train_iters is not None and training.train_samples is not None:
        problems.append(
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples}: "
            "give one of the two"
        )
    if training.train_iters is not None:
        foreign = {
            "lr_decay_samples": schedule.lr_decay_samples,
            "lr_warmup_samples": schedule.lr_warmup_samples,
        }
        own, other = "--train-iters", "iters"
    elif training.train_samples is not None:
        foreign = {
            "lr_decay_iters": schedule.lr_decay_iters,
            "lr_warmup_iters": schedule.lr_warmup_iters,
        }
        own, other = "--train-samples", "samples"
    else:
        return problems
    for dest, value in foreign.items():
        if dest in context.explicit and value:
            wanted = "--" + dest.rsplit("_", 1)[0].replace("_", "-") + "-" + other
            problems.append(f"--{dest.replace('_', '-')} {value}: contradicts {own}; use {wanted}")
    return problems


def check_schedule(config: Config, context: RunContext) -> list[str]:
    """Warmup, decay and the WSD anneal must fit into each other."""
    schedule, problems = config.schedule, []
    unit = "samples" if config.training.train_samples is not None else "iters"
    warmup = schedule.lr_warmup_samples if unit == "samples" else schedule.lr_warmup_iters
    decay = schedule.lr_decay_samples if unit == "samples" else schedule.lr_decay_iters
    if schedule.lr_warmup_fraction is not None:
        for name, value in (
            ("iters", schedule.lr_warmup_iters),
            ("samples", schedule.lr_warmup_samples),
        ):
            if value:
                problems.append(
                    f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{name} "
                    f"{value}: "
                    "give one of the two"
                )
    elif decay is not None and warmup >= decay:
        problems.append(f"--lr-warmup-{unit} {warmup}: must be below the decay, {decay} {unit}")
    for flag, value in (
        ("--min-lr", schedule.min_lr),
        ("--lr-warmup-init", schedule.lr_warmup_init),
    ):
        if schedule.lr is not None and value > schedule.lr:
            problems.append(f"{flag} {value}: above --lr {schedule.lr}; lower it")
    own, own_floor = schedule.decoupled_lr, schedule.decoupled_min_lr
    if own_floor is not None and own is None:
        problems.append(f"--decoupled-min-lr {own_floor}: needs --decoupled-lr")
    if own_floor is not None and own is not None and own_floor > own:
        problems.append(f"--decoupled-min-lr {own_floor}: above --decoupled-lr {own}; lower it")
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        problems.append(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler: give one "
            "of the two"
        )
    return problems + _check_wsd(config, decay, warmup)


def _check_wsd(config: Config, decay: int | None, warmup: int) -> list[str]:
    schedule = config.schedule
    anneal = schedule.lr_wsd_decay_iters
    if schedule.lr_decay_style != "WSD":
        return (
            [] if anneal is None else [f"--lr-wsd-decay-iters {anneal}: needs --lr-decay-style WSD"]
        )
    if config.training.train_samples is not None:
        return [
            "--lr-decay-style WSD: its anneal is given in steps; use --train-iters, not "
            "--train-samples"
        ]
    if anneal is None:
        return ["--lr-decay-style WSD: needs --lr-wsd-decay-iters"]
    if schedule.lr_warmup_fraction is not None and decay is not None:
        warmup = int(schedule.lr_warmup_fraction * decay)
    if decay is not None and anneal > decay - warmup:
        return [
            f"--lr-wsd-decay-iters {anneal}: longer than the {decay - warmup} steps after the "
            "warmup"
        ]
    return []


def check_optimizer(config: Config, context: RunContext) -> list[str]:
    """Weight-decay schedule, and the promise of the torch preset."""
    optimizer, problems = config.optimizer, []
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    style = optimizer.weight_decay_incr_style
    for name, value in (("start", start), ("end", end)):
        if style == "constant" and value not in (None, optimizer.weight_decay):
            problems.append(
                f"--{name}-weight-decay {value}: differs from --weight-decay "
                f"{optimizer.weight_decay} under "
                "--weight-decay-incr-style constant; choose linear or cosine"
            )
        if style != "constant" and value is None:
            problems.append(f"--weight-decay-incr-style {style}: needs --{name}-weight-decay")
    if style != "constant" and start is not None and end is not None and end < start:
        problems.append(f"--end-weight-decay {end}: below --start-weight-decay {start}")
    steps, restarts = optimizer.muon_num_ns_steps, optimizer.ns_restarts
    if restarts is not None:
        if optimizer.ns_form == "standard":
            problems.append(f"--ns-restarts {list(restarts)}: needs --ns-form gram or auto")
        if list(restarts) != sorted(set(restarts)) or restarts[-1] >= steps:
            problems.append(
                f"--ns-restarts {list(restarts)}: must ascend and stay below --muon-num-ns-steps "
                f"{steps}"
            )
    if optimizer.muon_coefficient_type == "cubic5" and steps != 5:
        problems.append(
            f"--muon-num-ns-steps {steps}: the cubic5 coefficients are for exactly 5 steps"
        )
    return problems + _check_torch_preset(config, context)


def _check_torch_preset(config: Config, context: RunContext) -> list[str]:
    if config.optimizer.muon_preset != "torch":
        return []
    fixed = {"muon_momentum_form": "ema", "ns_form": "standard", "ns_dtype": "bf16"}
    return [
        f"--{dest.replace('_', '-')} {getattr(config.optimizer, dest)}: --muon-preset torch is "
        f"{value} only; "
        "drop one of the two"
        for dest, value in fixed.items()
        if dest in context.explicit and getattr(config.optimizer, dest) != value
    ]


def check_precision(config: Config, context: RunContext) -> list[str]:
    """One compute dtype."""
    precision, problems = config.precision, []
    if precision.bf16 and precision.fp64:
        problems.append("--bf16 and --fp64: give one of the two")
    if precision.fp64 and precision.gather_in_bf16:
        problems.append("--fp64 and --gather-in-bf16: FP64 gathers in FP64; drop one of the two")
    if precision.gather_in_bf16 and config.ownership.collectives == "fsdp2":
        problems.append(
            "--gather-in-bf16: torch's FSDP2 (--collectives fsdp2, line A) gathers in the compute"
            " dtype; use --bf16 or another line"
        )
    if precision.fp64 and precision.grad_reduce_in_bf16:
        problems.append(
            "--fp64 and --grad-reduce-in-bf16: FP64 reduces in FP64; drop one of the two"
        )
    if precision.fp64 and "ns_dtype" in context.explicit and config.optimizer.ns_dtype != "auto":
        problems.append(
            f"--ns-dtype {config.optimizer.ns_dtype}: FP64 iterates in FP64; use auto with --fp64"
        )
    return problems
