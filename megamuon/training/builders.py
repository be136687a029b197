"""From flags to the settings of every room.

Owns the translation of ``Config`` into what the runtime, the optimizers, the schedule, the data
room and the profiler take.  Invariant: a flag is read here once, and nothing below this floor
knows flags. Tested by ``tests/training/test_builders.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megamuon.arguments import Config
from megamuon.arguments.derive import places
from megamuon.data.build import DataSpec
from megamuon.data.tokenizer import Tokenizer, build_tokenizer, pad_id, padded_vocab_size
from megamuon.matrices import Kind, LogicalParameter
from megamuon.models import GPTConfig, gpt_config_from_flags
from megamuon.optim import RECIPES, Schedule, ScheduleConfig, rest_of
from megamuon.optim.ns_plan import CpuDtype
from megamuon.ownership import PlannerSettings
from megamuon.profiling import ProfilingSettings
from megamuon.runtime import OptimizerSettings, RuntimeConfig
from megamuon.training.failures import TrainingError
from megamuon.training.progress import Progress

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How many samples of what size make a step."""

    micro: int  # samples per rank and forward
    total: int  # samples per step over all ranks
    count: int  # micro-batches per rank and step


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the ranks are laid out; see ``megamuon.mesh``."""

    replicas: int
    shards: int
    tp: int


def grid(config: Config, world_size: int) -> Grid:
    """Replicas of ``--shard-size`` data-parallel ranks with ``--sharding hsdp``, else one
    replica.
    """
    flags = config.parallel
    tp = flags.tensor_model_parallel_size
    ranks = places(tp, world_size)
    assert ranks is not None  # checked with the flags
    shards = flags.shard_size if flags.sharding == "hsdp" and flags.shard_size else ranks
    return Grid(replicas=ranks // shards, shards=shards, tp=tp)


def batches(config: Config, sample_ranks: int) -> Batches:
    """Training batches."""
    micro, total = config.training.micro_batch_size, config.training.global_batch_size
    assert micro is not None and total is not None  # both were checked with the flags
    return Batches(micro=micro, total=total, count=total // (micro * sample_ranks))


def evaluation_batches(config: Config, sample_ranks: int) -> Batches:
    """Batches of evaluation."""
    flags = config.validation
    micro, total = flags.eval_micro_batch_size, flags.eval_global_batch_size
    assert micro is not None and total is not None
    return Batches(micro=micro, total=total, count=total // (micro * sample_ranks))


def train_iterations(config: Config) -> int:
    """Optimizer steps over all runs; 0 with ``--skip-train`` and no length."""
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    if training.train_samples is not None:
        return training.train_samples // (training.global_batch_size or 1)
    return 0


def sample_counts(config: Config, progress: Progress | None = None) -> tuple[int, int, int]:
    """Samples of the training, validation and test set that the whole run may need (Megatron's
    rule).

    Megatron counts as if all steps ran with the present flags.  A run that resumes (``progress``)
    with another batch or evaluation interval may need more than that: what it has consumed, and
    what its remaining steps will.
    """
    training, flags, done = config.training, config.validation, progress or Progress()
    steps, size = train_iterations(config), training.global_batch_size or 0
    train = training.train_samples or steps * size
    train = max(train, done.consumed_train_samples + (steps - done.iteration) * size)

    def rounds(step: int) -> int:
        return step // flags.eval_interval if flags.eval_interval else 0

    each = flags.eval_iters * (flags.eval_global_batch_size or 0)
    valid = (rounds(steps) + 1) * each
    if training.skip_train:
        return 0, valid, each
    left = rounds(steps) - rounds(done.iteration) + 1
    return train, max(valid, done.consumed_valid_samples + left * each), each


def dataset_counts(config: Config, progress: Progress) -> list[int]:
    """``sample_counts`` as the datasets are to be built: what a run has begun to draw keeps its
    order, however long the run becomes.  ``progress`` remembers what was asked for.
    """
    train, valid, test = sample_counts(config, progress)
    if config.training.skip_train:  # evaluates from the beginning of a set of its own
        return [train, valid, test]
    endless = config.data.dataloader_type == "cyclic"
    return [
        progress.train_order.ask(train, endless=endless),
        progress.valid_order.ask(valid, endless=endless),
        test,
    ]


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer that the flags describe.  Raises TrainingError that names the flag to change.

    Building it reads the user's files, so what goes wrong is theirs to know, without a traceback.
    """
    flags = config.tokenizer
    try:
        return build_tokenizer(
            flags.tokenizer_type,
            flags.tokenizer_model,
            flags.vocab_size,
            vocab_file=flags.vocab_file,
            merge_file=flags.merge_file,
            eod_token=flags.eod_token,
            trust_remote_code=flags.trust_remote_code,
        )
    except (ValueError, OSError, ImportError) as error:
        raise TrainingError(str(error)) from error


def vocabulary_rows(config: Config, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: given, or the larger of tokenizer's and preset's vocabulary, padded.

    Raises TrainingError where the tokenizer has more ids than rows were given.
    """
    flags = config.tokenizer
    if flags.padded_vocab_size is None:
        largest = max(tokenizer.vocab_size, flags.vocab_size or 0)
        return padded_vocab_size(largest, config.model.make_vocab_size_divisible_by)
    if flags.padded_vocab_size < tokenizer.vocab_size:
        raise TrainingError(
            f"--padded-vocab-size {flags.padded_vocab_size}: the tokenizer has"
            f" {tokenizer.vocab_size} ids; give at least that many rows"
        )
    return flags.padded_vocab_size


def model_config(config: Config, tokenizer: Tokenizer) -> GPTConfig:
    """The decoder that the flags describe."""
    rows = vocabulary_rows(config, tokenizer)
    return gpt_config_from_flags(config.model, padded_vocab_size=rows, recompute=config.recompute)


def data_spec(
    config: Config, tokenizer: Tokenizer, samples: tuple[int | None, int | None, int | None]
) -> DataSpec:
    """The datasets that the flags describe."""
    flags = config.data
    assert config.model.seq_length is not None
    return DataSpec(
        sequence_length=config.model.seq_length,
        samples=samples,
        seed=config.training.seed,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        pad=pad_id(tokenizer),
        data_path=flags.data_path,
        split=flags.split,
        train_data_path=flags.train_data_path,
        valid_data_path=flags.valid_data_path,
        test_data_path=flags.test_data_path,
        mock_data=flags.mock_data,
        data_cache_path=flags.data_cache_path,
        fast_cache_load=flags.dataloader_fast_cache_load,
        mmap_bin_files=flags.mmap_bin_files,
        builder_threads=flags.num_dataset_builder_threads,
        mid_level_dataset_surplus=flags.mid_level_dataset_surplus,
        shuffle=flags.shuffle,
        eod_mask_loss=flags.eod_mask_loss,
        reset_position_ids=flags.reset_position_ids,
        reset_attention_mask=flags.reset_attention_mask,
    )


def optimizer_settings(config: Config, *, ns_cpu_dtype: CpuDtype = "fp32") -> OptimizerSettings:
    """Which optimizer goes where; ``ns_cpu_dtype``: what ``--ns-dtype auto`` means on CPUs."""
    flags = config.optimizer
    recipe = RECIPES[flags.optimizer]
    return OptimizerSettings(
        matrices=recipe.name,
        matrix=recipe.from_flags(flags, ns_cpu_dtype) if recipe.whole else None,
        rest=rest_of(recipe.name).from_flags(flags, ns_cpu_dtype),
        clip=flags.clip_grad,
        decay_qk_norm=flags.apply_wd_to_qk_layernorm,
        count_zeros=config.logging.log_num_zeros_in_grad,
    )


def runtime_config(config: Config, *, ns_cpu_dtype: CpuDtype = "fp32") -> RuntimeConfig:
    """How the model is sharded and its bytes move."""
    owners, precision = config.ownership, config.precision
    wide = torch.float64 if precision.fp64 else torch.float32
    return RuntimeConfig(
        zero_stage=config.parallel.zero_stage,
        collectives=owners.collectives,
        fabric=owners.fabric,
        ring_slots=owners.ring_slots,
        chunk_bytes=owners.chunk_kib * KIB,
        publish_tile_bytes=owners.publish_tile_kib * KIB,
        collective_deadline=owners.collective_deadline,
        check_collective_order=owners.check_collective_order,
        # "none" is what becomes of slices that nothing needs whole: AdamW and SGD ask nobody.
        matrix_update="gather" if owners.matrix_update == "gather" else "owner",
        publish=config.parallel.publish,
        compute_dtype=torch.bfloat16 if precision.bf16 else wide,
        gather_dtype=torch.bfloat16 if precision.gather_in_bf16 else None,
        reduce_dtype=torch.bfloat16 if precision.grad_reduce_in_bf16 else wide,
        master_dtype=wide,
        owner_layout=owners.param_layout == "owner",
        unit_threshold=owners.owner_unit_threshold,
        merge_experts=owners.merge_experts,
        planner=PlannerSettings(
            policy=owners.owner_planner,
            byte_cap=owners.owner_byte_cap,
            spread_layers=owners.owner_layer_spreading,
            balance_rails=owners.owner_column_balance,
        ),
        ns_cost=owners.ns_cost,
        ns_cost_file=owners.ns_cost_file,
        ns_cost_cache=owners.ns_cost_cache,
        seed=config.training.seed,
        optimizer=optimizer_settings(config, ns_cpu_dtype=ns_cpu_dtype),
    )


def schedule_config(config: Config) -> ScheduleConfig:
    """Learning rate and weight decay, counted in samples."""
    flags, decay, training = config.schedule, config.optimizer, config.training
    assert flags.lr is not None
    size = training.global_batch_size or 1
    if training.train_samples is not None:
        length = training.train_samples
        decay_steps = flags.lr_decay_samples or length
        warmup: float = flags.lr_warmup_samples
    else:
        length = train_iterations(config) * size
        decay_steps = (flags.lr_decay_iters or train_iterations(config)) * size
        warmup = flags.lr_warmup_iters * size
    if flags.lr_warmup_fraction is not None:
        warmup = flags.lr_warmup_fraction * decay_steps  # not rounded, as in Megatron
    constant = decay.weight_decay_incr_style == "constant"
    start = decay.weight_decay if constant else decay.start_weight_decay
    end = decay.weight_decay if constant else decay.end_weight_decay
    assert start is not None and end is not None
    return ScheduleConfig(
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        init_lr=flags.lr_warmup_init,
        warmup_steps=warmup,  # type: ignore[arg-type]
        decay_steps=decay_steps,
        style=flags.lr_decay_style,
        wsd_style=flags.lr_wsd_decay_style,
        wsd_steps=None if flags.lr_wsd_decay_iters is None else flags.lr_wsd_decay_iters * size,
        start_wd=start,
        end_wd=end,
        wd_style=decay.weight_decay_incr_style,
        wd_steps=length,
        decoupled_lr=flags.decoupled_lr,
        decoupled_min_lr=flags.decoupled_min_lr,
    )


def rate_of(schedule: Schedule) -> Callable[[LogicalParameter], float]:
    """The present learning rate of a parameter: ``--decoupled-lr`` for token tables and the
    head.
    """
    rate, apart = schedule.lr(), schedule.decoupled()
    return lambda parameter: apart if parameter.kind in (Kind.EMBEDDING, Kind.HEAD) else rate


def profiling_settings(config: Config) -> ProfilingSettings:
    """Profiles and memory snapshots."""
    flags = config.profiling
    return ProfilingSettings(
        profile=flags.profile,
        step_start=flags.profile_step_start,
        step_end=flags.profile_step_end,
        ranks=flags.profile_ranks,
        use_pytorch_profiler=flags.use_pytorch_profiler,
        trace_dir=config.logging.tensorboard_dir,
        record_memory_history=flags.record_memory_history,
        memory_snapshot_path=flags.memory_snapshot_path,
    )
