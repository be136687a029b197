"""Flags of sharding, owners, recompute and process groups.

Owns ``ParallelFlags``, ``OwnershipFlags``, ``RecomputeFlags``, ``DistributedFlags`` and
``FaultFlags``. Invariant: as in ``config_model``. Tested by ``tests/arguments/test_validate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megamuon.collectives import TRANSPORTS
from megamuon.flags import flag
from megamuon.ownership import POLICIES, PlannerSettings
from megamuon.runtime.config import RuntimeConfig

KIB = 1024


def _number_or_none(word: str) -> float | None:
    return None if word.lower() == "none" else float(word)


@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """How the model lies on the ranks: replicas and shards of data-parallel ranks, and the
    tensor-parallel ranks behind each of them.
    """

    sharding: Literal["fsdp", "hsdp"] = flag(
        "fsdp",
        "fsdp: shard over all data-parallel ranks, one replica; hsdp: replicas of "
        "--shard-size ranks, one owner per matrix in the whole grid",
    )
    shard_size: int | None = flag(
        None,
        "data-parallel ranks of a replica with --sharding hsdp; those of a node when not given",
        low=1,
    )
    zero_stage: Literal[1, 2, 3] = flag(
        RuntimeConfig.zero_stage,
        "3: parameters are released after the forward and gathered again; 2: kept until the "
        "backward; 1: whole parameters stay resident, a baseline for --sharding fsdp",
    )
    publish: Literal["async", "sync"] = flag(
        RuntimeConfig.publish,
        "--sharding hsdp: new weights travel to the replicas behind later updates and the next "
        "forward, or before the step ends",
    )
    tensor_model_parallel_size: int = flag(1, "ranks that share the work of each layer", low=1)
    sequence_parallel: bool = flag(
        False,
        "split norms and residuals along the sequence over the tensor-parallel ranks",
    )
    gradient_reduction: Literal["micro-batch", "step"] = flag(
        "micro-batch", "reduce gradients after every micro-batch, or once per step from FP32 sums"
    )


@dataclass(frozen=True, kw_only=True)
class OwnershipFlags:
    """Who owns which matrix, what that is decided from, and how bytes move."""

    line: Literal["A", "B", "C", "D", "M"] = flag(
        "D",
        "preset of the next three flags; A = torch FSDP2 with AdamW; B = even slices, every rank "
        "updates whole matrices; C = owners, by calls of torch.distributed; D = owners, by "
        "ready-scheduled operators; M = owners by segments sent point to point",
    )
    param_layout: Literal["owner", "even"] = flag(
        "owner",
        "owner: whole parameters on one rank each; even: equal slices of dim 0 on every rank",
    )
    collectives: str = flag(
        RuntimeConfig.collectives,
        "ready: ready-scheduled operators over memory that ranks share; falls back to "
        "grouped, saying why, where there is no fabric. The others are calls of torch.distributed: "
        "one per layer group; one per owner in it; a schedule of sends and receives; one of equal, "
        "padded shares; or those of torch's fully_shard",
        choices=lambda: (*TRANSPORTS, "fsdp2"),
    )
    matrix_update: Literal["owner", "gather", "none"] = flag(
        RuntimeConfig.matrix_update,
        "where the matrix optimizer runs: on the owner, on every rank after gathering, or nowhere",
    )
    fabric: Literal["auto", "host", "nccl"] = flag(
        RuntimeConfig.fabric,
        "what --collectives ready runs on; host: shared memory of the CPU ranks of one machine; "
        "nccl: GPUs, by kernels over NCCL's device interface (not yet verified on a GPU); auto: "
        "host where it can be had, else grouped with a printed line. A named fabric that cannot be "
        "had is an error",
    )
    ring_slots: int = flag(
        RuntimeConfig.ring_slots,
        "--collectives ready: chunks on the way between two ranks, per source",
        low=1,
        high=64,
    )
    chunk_kib: int = flag(
        RuntimeConfig.chunk_bytes // KIB,
        "--collectives ready: size of a chunk of a gather or reduction, in KiB",
        low=1,
        high=1024,
    )
    publish_tile_kib: int = flag(
        RuntimeConfig.publish_tile_bytes // KIB,
        "--collectives ready: size of a tile of new weights on the way to other replicas, in KiB",
        low=1,
        high=65536,
    )
    collective_deadline: float = flag(
        RuntimeConfig.collective_deadline,
        "--collectives ready: seconds that an operator may stand still before all ranks abort",
        above=0.0,
    )
    check_collective_order: bool = flag(
        RuntimeConfig.check_collective_order,
        "for debugging: let every gather and reduction say which layer it is for, and stop where "
        "ranks are in different calls; costs a small collective per call",
    )
    owner_planner: str = flag(
        PlannerSettings.policy,
        "assign by Newton-Schulz time (longest first), by elements, or in turns; the last three "
        "are those of line M: per layer, over all layers, or whichever of the two fits",
        choices=lambda: POLICIES,
    )
    owner_unit_threshold: int = flag(
        RuntimeConfig.unit_threshold,
        "parameters of so many elements are units of their own; smaller ones of a layer merge",
        low=0,
    )
    merge_experts: bool = flag(
        RuntimeConfig.merge_experts,
        "let the small matrices of experts merge into units like all others",
    )
    owner_byte_cap: float | None = flag(
        PlannerSettings.byte_cap,
        "allowed share of bytes above the mean rank; `none` switches the cap off",
        low=0.0,
        parse=_number_or_none,
    )
    owner_layer_spreading: bool = flag(
        PlannerSettings.spread_layers,
        "let the units of a layer share a rank",
        off_names=("--no-owner-layer-spreading",),
    )
    owner_column_balance: bool = flag(
        PlannerSettings.balance_rails,
        "choose ranks without balancing rails first",
        off_names=("--no-owner-column-balance",),
    )
    ns_cost: Literal["measured", "file", "closed-form"] = flag(
        RuntimeConfig.ns_cost, "where the time of a Newton-Schulz iteration per shape comes from"
    )
    ns_cost_file: str | None = flag(None, "cost table for --ns-cost file")
    ns_cost_cache: str | None = flag(
        None, "directory of measured costs; the user's cache directory when not given"
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """What the backward computes again instead of keeping."""

    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "whole layers, or the modules of --recompute-modules"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "full only: uniform chunks of layers, or the first layers only"
    )
    recompute_num_layers: int | None = flag(
        None, "layers per chunk (uniform) or number of recomputed layers (block)", low=1
    )
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = flag(
        None, "modules of --recompute-granularity selective; core_attn when not given"
    )


@dataclass(frozen=True, kw_only=True)
class DistributedFlags:
    """Process groups."""

    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "collective backend; nccl where there are GPUs and gloo elsewhere when not given"
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes after which a collective without an answer is an error", low=1
    )


@dataclass(frozen=True, kw_only=True)
class FaultFlags:
    """Signals, failed saves and known bad steps."""

    exit_signal_handler: bool = flag(
        False, "on the signal: drop the step under way at its next micro-batch, save and exit"
    )
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"] = flag(
        "SIGTERM", "signal that --exit-signal-handler listens to"
    )
    iterations_to_skip: tuple[int, ...] = flag(
        (), "steps (counted from 1) whose data is consumed without training on it", low=1
    )
    max_skipped_iterations: int = flag(
        20,
        "the run ends after so many skipped steps in a row (loss or gradient not finite)",
        low=1,
    )
    save_failure: Literal["fatal", "warn"] = flag(
        "fatal",
        "a failed save ends the run, or is reported and the run goes on; the last one must succeed",
    )
    max_failed_saves: int = flag(
        3, "with --save-failure warn, the run ends after so many failed saves in a row", low=1
    )
