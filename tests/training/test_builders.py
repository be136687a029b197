"""Flags arrive in the settings of every room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamuon.arguments import Config, parse_config
from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.models import PRESETS
from megamuon.optim import RECIPES, MuonConfig, NorMuonConfig, Schedule, update_scale
from megamuon.placements import Placed
from megamuon.runtime import OptimizerSettings, RuntimeConfig
from megamuon.training.builders import (
    Grid,
    batches,
    grid,
    optimizer_settings,
    rate_of,
    runtime_config,
    sample_counts,
    schedule_config,
    tokenizer_of,
    train_iterations,
    vocabulary_rows,
)
from megamuon.training.failures import TrainingError
from megamuon.training.progress import Progress
from tests.support.training import flags


def config_of(world: int = 1, node: int | None = None, **changes: object) -> Config:
    return parse_config(
        flags(**changes), presets=PRESETS, world_size=world, local_world_size=node
    ).config


@pytest.mark.parametrize(
    ("changes", "replicas", "shards", "tp"),
    [
        ({}, 1, 8, 1),
        ({"tensor_model_parallel_size": 2}, 1, 4, 2),
        ({"sharding": "hsdp"}, 2, 4, 1),  # nodes of four
        ({"sharding": "hsdp", "shard_size": 2}, 4, 2, 1),
        ({"sharding": "hsdp", "tensor_model_parallel_size": 2}, 2, 2, 2),
    ],
)
def test_grids(changes: dict[str, object], replicas: int, shards: int, tp: int) -> None:
    made = grid(config_of(world=8, node=4, **changes), 8)
    assert made == Grid(replicas=replicas, shards=shards, tp=tp)


def test_batches_divide_over_ranks() -> None:
    sizes = batches(config_of(world=2, global_batch_size=12), 2)
    assert (sizes.micro, sizes.total, sizes.count) == (2, 12, 3)


def test_sample_counts_follow_megatrons_rule() -> None:
    config = config_of(train_iters=10, global_batch_size=4, eval_interval=3, eval_iters=5)
    assert sample_counts(config) == (40, (10 // 3 + 1) * 5 * 4, 5 * 4)
    assert sample_counts(config_of(train_iters=None, skip_train=True)) == (0, 4, 4)
    samples = config_of(train_iters=None, train_samples=44, global_batch_size=4)
    assert train_iterations(samples) == 11
    assert sample_counts(samples)[0] == 44


def test_sample_counts_cover_what_a_resumed_run_still_reads() -> None:
    config = config_of(train_iters=10, global_batch_size=4, eval_interval=3, eval_iters=5)
    as_planned = Progress(iteration=6, consumed_train_samples=24, consumed_valid_samples=2 * 5 * 4)
    assert sample_counts(config, as_planned) == sample_counts(config)
    # Evaluated at every step, and with a larger batch, before the flags were changed.
    other = Progress(iteration=6, consumed_train_samples=48, consumed_valid_samples=6 * 5 * 4)
    assert sample_counts(config, other) == (48 + 4 * 4, (6 + 1 + 1) * 5 * 4, 5 * 4)


def test_schedule_counts_samples() -> None:
    config = config_of(
        train_iters=100,
        global_batch_size=4,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=20,
        lr_warmup_iters=10,
        min_lr=1e-3,
        weight_decay=0.3,
    )
    made = schedule_config(config)
    assert (made.decay_steps, made.warmup_steps, made.wsd_steps) == (400, 40, 80)
    assert (made.max_lr, made.min_lr, made.start_wd, made.end_wd) == (1e-2, 1e-3, 0.3, 0.3)
    fraction = schedule_config(config_of(train_iters=100, lr_warmup_fraction=0.125))
    assert fraction.warmup_steps == 0.125 * 200
    samples = schedule_config(config_of(train_iters=None, train_samples=50, lr_warmup_samples=7))
    assert (samples.decay_steps, samples.warmup_steps) == (50, 7)


def test_weight_decay_schedule() -> None:
    made = schedule_config(
        config_of(weight_decay_incr_style="cosine", start_weight_decay=0.1, end_weight_decay=0.2)
    )
    assert (made.start_wd, made.end_wd, made.wd_style, made.wd_steps) == (0.1, 0.2, "cosine", 12)


def test_muon_flags() -> None:
    made = optimizer_settings(
        config_of(
            muon_momentum=0.9,
            no_muon_nesterov=True,
            muon_scale_mode="unit_rms_norm",
            muon_extra_scale_factor=0.5,
            muon_num_ns_steps=4,
            muon_coefficient_type="quintic",
            ns_form="gram",
            ns_restarts=[2],
        )
    ).matrix
    assert (made.momentum, made.nesterov, made.scale, made.extra_scale) == (
        0.9,
        False,
        "unit_rms_norm",
        0.5,
    )
    schulz = made.newton_schulz
    assert (schulz.coefficients, schulz.steps, schulz.form) == ("quintic", 4, "gram")
    assert schulz.restarts == (2,)


def test_torch_preset_is_torch_optim_muon() -> None:
    made = optimizer_settings(config_of(muon_preset="torch")).matrix
    wanted = replace(MuonConfig.torch_preset(ns_steps=5), scale="shape_scaling")
    assert made == wanted


def test_gathers_may_be_narrower_than_the_arithmetic() -> None:
    made = runtime_config(config_of(gather_in_bf16=True))
    assert (made.compute_dtype, made.sent_dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "compute", "reduce", "master"),
    [
        ({}, torch.float32, torch.float32, torch.float32),
        ({"bf16": True}, torch.bfloat16, torch.float32, torch.float32),
        (
            {"bf16": True, "grad_reduce_in_bf16": True},
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
        ),
        ({"fp64": True}, torch.float64, torch.float64, torch.float64),
    ],
)
def test_number_formats(
    changes: dict[str, object], compute: torch.dtype, reduce: torch.dtype, master: torch.dtype
) -> None:
    made = runtime_config(config_of(**changes))
    assert (made.compute_dtype, made.reduce_dtype, made.master_dtype) == (compute, reduce, master)


def test_runtime_flags() -> None:
    made = runtime_config(
        config_of(
            zero_stage=2,
            collectives="per_owner",
            owner_unit_threshold=7,
            owner_planner="numel",
            owner_byte_cap=0.25,
            no_owner_layer_spreading=True,
            no_owner_column_balance=True,
            seed=5,
            clip_grad=0.5,
            adam_beta2=0.9,
        )
    )
    assert (made.zero_stage, made.collectives, made.unit_threshold) == (2, "per_owner", 7)
    planner = made.planner
    assert (planner.policy, planner.byte_cap) == ("numel", 0.25)
    assert not planner.spread_layers
    assert not planner.balance_rails
    assert (made.seed, made.optimizer.clip, made.optimizer.rest.beta2) == (5, 0.5, 0.9)
    even = runtime_config(config_of(optimizer="adam", param_layout="even", owner_byte_cap="none"))
    assert not even.owner_layout
    assert even.planner.byte_cap is None
    assert even.optimizer.matrices == "adam"


@pytest.mark.parametrize(
    ("changes", "owner_layout", "collectives", "update"),
    [
        ({"line": "A"}, False, "fsdp2", "owner"),
        ({"line": "B"}, False, "grouped", "gather"),
        ({"line": "C"}, True, "grouped", "owner"),
        ({"line": "D"}, True, "ready", "owner"),
        ({"line": "M", "collectives": "padded"}, True, "padded", "owner"),
    ],
)
def test_lines(
    changes: dict[str, object], owner_layout: bool, collectives: str, update: str
) -> None:
    made = runtime_config(config_of(world=2, publish="sync", merge_experts=True, **changes))
    assert (made.owner_layout, made.collectives) == (owner_layout, collectives)
    assert (made.matrix_update, made.publish, made.merge_experts) == (update, "sync", True)
    assert made.planner.policy == ("role_greedy" if changes["line"] == "M" else "lpt")


def test_python_and_the_command_line_train_one_system_by_default() -> None:
    changes = {"ns_cost": None, "owner_unit_threshold": 5_000_000}  # not the tests', nor nano's
    made, settings = runtime_config(config_of(world=2, **changes)), RuntimeConfig()
    assert (made.collectives, made.ns_cost) == ("ready", "measured")
    # Flags spell Muon's scale as Megatron does; that it is the same one is tested below.
    assert made == replace(settings, optimizer=made.optimizer)
    assert replace(made.optimizer, matrix=None) == settings.optimizer


def test_operators() -> None:
    made = runtime_config(
        config_of(
            world=2,
            fabric="host",
            ring_slots=3,
            chunk_kib=4,
            publish_tile_kib=16,
            collective_deadline=1.5,
        )
    )
    assert (made.fabric, made.ring_slots, made.collective_deadline) == ("host", 3, 1.5)
    assert (made.chunk_bytes, made.publish_tile_bytes) == (4096, 16384)


def test_matrix_optimizers() -> None:
    made = optimizer_settings(
        config_of(optimizer="normuon", muon_momentum=0.8, normuon_beta2=0.9, normuon_eps=1e-9)
    ).matrix
    assert (made.muon.momentum, made.beta2, made.eps) == (0.8, 0.9, 1e-9)
    shampoo = optimizer_settings(
        config_of(
            optimizer="shampoo",
            shampoo_beta1=0.5,
            shampoo_beta2=0.75,
            shampoo_eps=1e-7,
            shampoo_precondition_frequency=3,
            shampoo_max_preconditioner_dim=64,
            shampoo_grafting="rmsprop",
        )
    ).matrix
    assert (shampoo.beta1, shampoo.beta2, shampoo.eps) == (0.5, 0.75, 1e-7)
    assert (shampoo.precondition_frequency, shampoo.max_preconditioner_dim) == (3, 64)
    assert shampoo.grafting.rule == "rmsprop"
    settings = optimizer_settings(
        config_of(
            optimizer="soap",
            soap_variant="fb",
            soap_beta1=0.6,
            soap_beta2=0.7,
            soap_shampoo_beta=0.8,
            soap_eps=1e-6,
            soap_precondition_frequency=4,
            soap_max_precond_dim=128,
        )
    )
    assert settings.matrices == "soap"
    soap = settings.matrix
    assert (soap.variant, soap.beta1, soap.beta2, soap.shampoo_beta) == ("fb", 0.6, 0.7, 0.8)
    assert (soap.eps, soap.precondition_frequency, soap.max_precond_dim) == (1e-6, 4, 128)


@pytest.mark.parametrize("name", RECIPES)
def test_defaults_of_the_flags_are_those_of_the_optimizers(name: str) -> None:
    made, wanted = optimizer_settings(config_of(optimizer=name)), OptimizerSettings(matrices=name)
    assert made.rest == wanted.rest
    if name in ("muon", "normuon"):  # the flags spell Muon's scale as Megatron does
        schulz = replace(wanted.newton_schulz, steps=5)
        assert made.newton_schulz == schulz
        assert len(schulz.polynomials) == len(wanted.newton_schulz.polynomials)
        scales = [
            update_scale(muon.scale, 96, 32) * muon.extra_scale
            for muon in (getattr(s.matrix, "muon", s.matrix) for s in (made, wanted))
        ]
        assert scales[0] == scales[1]
        muon = MuonConfig(scale="spectral", extra_scale=0.2, newton_schulz=schulz)
        wanted = replace(wanted, matrix=muon if name == "muon" else NorMuonConfig(muon=muon))
    assert made.matrix == wanted.matrix


def test_decoupled_learning_rate() -> None:
    config = config_of(lr_decay_style="linear", decoupled_lr=4e-2, min_lr=2e-3)

    def started(config: Config) -> Schedule:
        schedule = Schedule(schedule_config(config))
        schedule.advance(6)  # half of six steps of two samples
        return schedule

    schedule = started(config)
    rate = rate_of(schedule)
    matrix, table, head = (parameter(kind) for kind in (Kind.MATRIX, Kind.EMBEDDING, Kind.HEAD))
    assert rate(matrix) == pytest.approx((1e-2 + 2e-3) / 2)
    assert rate(table) == rate(head) == pytest.approx((4e-2 + 2e-3) / 2)
    floor = config_of(lr_decay_style="linear", decoupled_lr=4e-2, decoupled_min_lr=0.0)
    assert rate_of(started(floor))(table) == pytest.approx(2e-2)
    assert rate_of(Schedule(schedule_config(config_of())))(head) == 1e-2


def parameter(kind: Kind) -> LogicalParameter:
    return LogicalParameter(
        name=kind.value,
        shape=(2, 2),
        kind=kind,
        route=Route.ADAMW_OWNER,
        **placements_for(Route.ADAMW_OWNER, Placed(shape=(2, 2)), owned=True),
        reason="",
    )


def test_vocabulary_rows() -> None:
    config = config_of(model="tiny")
    assert vocabulary_rows(config, tokenizer_of(config)) == 320  # 257 ids in multiples of 64
    given = config_of(padded_vocab_size=300)
    assert vocabulary_rows(given, tokenizer_of(given)) == 300
    short = replace(given, tokenizer=replace(given.tokenizer, padded_vocab_size=100))
    with pytest.raises(TrainingError, match="--padded-vocab-size 100.*257 ids"):
        vocabulary_rows(short, tokenizer_of(short))


def test_a_tokenizer_that_cannot_be_built_is_one_line_for_the_user(tmp_path: Path) -> None:
    config = config_of()
    for content in (None, "{"):
        path = tmp_path / f"{content}.json"
        if content is not None:
            path.write_text(content)
        flags = replace(
            config.tokenizer, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)
        )
        with pytest.raises(TrainingError, match="--tokenizer-model .*json: no"):
            tokenizer_of(replace(config, tokenizer=flags))
