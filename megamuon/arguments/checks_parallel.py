"""Checks of the grid of ranks, tensor parallelism, lines, owners and experts.

Invariant: every check is a pure function of the resolved configuration that returns *all* its
problems, one line each with the flag, its value and what to change; no check raises, prints or
changes anything. Tested by ``tests/arguments/test_validate_parallel.py``.
"""

from __future__ import annotations

from megamuon.arguments.config import Config
from megamuon.arguments.derive import places
from megamuon.arguments.run_context import RunContext
from megamuon.optim.registry import RECIPES


def check_grid(config: Config, context: RunContext) -> list[str]:
    """Ranks must divide into replicas, shards and tensor-parallel ranks."""
    flags, problems = config.parallel, []
    tp, size, world = flags.tensor_model_parallel_size, flags.shard_size, context.world_size
    ranks = places(tp, world)
    if ranks is None and tp > 0:
        problems.append(
            f"--tensor-model-parallel-size {tp}: does not divide the {world} ranks; choose a"
            " divisor"
        )
    if flags.sharding != "hsdp":
        if size is not None:
            problems.append(f"--shard-size {size}: needs --sharding hsdp")
        return problems
    if flags.zero_stage == 1:
        problems.append(
            "--zero-stage 1: not applicable with --sharding hsdp, whose replicas gather; use 2 or"
            " 3, or --sharding fsdp"
        )
    if "shard_size" in context.unusable or ranks is None:
        return problems
    if size is None:
        problems.append(
            f"--sharding hsdp: the {context.local_world_size or world} ranks of a node do not"
            f" divide by --tensor-model-parallel-size {tp}; give --shard-size"
        )
    elif size > 0 and ranks % size:
        origin = "" if "shard_size" in context.explicit else " (the ranks of this node)"
        of = f"{ranks} data-parallel ranks"
        if tp > 1:
            of += f" ({world} ranks / --tensor-model-parallel-size {tp})"
        problems.append(f"--shard-size {size}{origin}: does not divide the {of}; give a divisor")
    return problems


def check_tensor_parallel(config: Config, context: RunContext) -> list[str]:
    """Every tensor-parallel rank needs a part of everything that is cut."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if tp <= 1:
        return []
    parts = {
        "--num-query-groups" if model.group_query_attention else "--num-attention-heads": (
            model.num_query_groups if model.group_query_attention else model.num_attention_heads
        ),
        "--ffn-hidden-size": model.ffn_hidden_size if model.num_experts is None else None,
        "--moe-ffn-hidden-size": model.moe_ffn_hidden_size if model.num_experts else None,
        "--moe-shared-expert-intermediate-size": (
            model.moe_shared_expert_intermediate_size if model.num_experts else None
        ),
    }
    # Pieces are cut as torch.chunk does, ceil(size / tp) each, so the last ones may be empty.
    problems = [
        f"--tensor-model-parallel-size {tp}: {flag} {size} gives pieces to only"
        f" {-(-size // -(-size // tp))} ranks, and none may be empty; use a smaller size"
        for flag, size in parts.items()
        if size is not None and size > 0 and -(-size // -(-size // tp)) < tp
    ]
    length = model.seq_length
    if config.parallel.sequence_parallel and length and length % tp:
        problems.append(
            f"--seq-length {length}: not a multiple of --tensor-model-parallel-size {tp}, which"
            " --sequence-parallel needs"
        )
    return problems


def check_line(config: Config, context: RunContext) -> list[str]:
    """Layout, collectives and update must be a combination that exists."""
    owners, chosen = config.ownership, config.optimizer.optimizer
    if "optimizer" in context.unusable:
        return []
    whole = RECIPES[chosen].whole
    layout, moves, update = owners.param_layout, owners.collectives, owners.matrix_update
    if owners.line == "A" and whole:
        return [
            f"--line A and --optimizer {chosen}: line A is torch's fully_shard with AdamW; use"
            " --optimizer adam or sgd, or --line B, C, D or M"
        ]
    problems = []
    if moves == "fsdp2":
        if (layout, update) != ("even", "none") or whole:
            problems.append(
                "--collectives fsdp2: goes with --param-layout even, --matrix-update none and"
                " --optimizer adam or sgd (--line A), not with"
                f" {layout}, {update} and {chosen}"
            )
        if owners.check_collective_order:
            problems.append(
                "--check-collective-order: torch's FSDP2 (--collectives fsdp2, line A) makes its"
                " own calls; drop the flag, or use another line"
            )
        return problems
    if moves == "ready" and layout != "owner":
        problems.append(
            f"--collectives ready: goes with --param-layout owner, not with {layout}; use"
            " --collectives grouped, or --param-layout owner (--line D)"
        )
    if layout == "owner" and update == "gather":
        problems.append(
            "--param-layout owner and --matrix-update gather: an owner has its matrices whole; use"
            " --matrix-update owner, or --param-layout even"
        )
    if not whole:
        return problems
    if update == "none":
        problems.append(
            f"--optimizer {chosen} and --matrix-update none: it needs whole matrices; use"
            " --matrix-update owner or gather, or --optimizer adam or sgd"
        )
    elif layout == "even" and update == "owner":
        problems.append(
            f"--param-layout even and --matrix-update owner with --optimizer {chosen}: slices have"
            " no owner; use --matrix-update gather (--line B), or --param-layout owner"
        )
    return problems


def check_stages(config: Config, context: RunContext) -> list[str]:
    """What line M and the ZeRO-1 baseline do not go with."""
    owners, flags, problems = config.ownership, config.parallel, []
    if owners.line == "M":
        others = {
            "--sharding hsdp": flags.sharding != "fsdp",
            f"--zero-stage {flags.zero_stage}": flags.zero_stage != 3,
            f"--tensor-model-parallel-size {flags.tensor_model_parallel_size}": (
                flags.tensor_model_parallel_size != 1
            ),
            f"--param-layout {owners.param_layout}": owners.param_layout != "owner",
        }
        problems += [
            f"{flag}: not applicable with --line M, which is owners on one replica at ZeRO-3"
            " without tensor parallelism; use --line C or D"
            for flag, differs in others.items()
            if differs
        ]
    elif flags.zero_stage == 1 and owners.param_layout != "owner":
        problems.append(
            f"--zero-stage 1: not applicable with --param-layout {owners.param_layout}; it is the"
            " baseline of owners (--line C or D)"
        )
    return problems


def check_ownership(config: Config, context: RunContext) -> list[str]:
    """Where costs come from."""
    ownership, problems = config.ownership, []
    if ownership.ns_cost == "file" and ownership.ns_cost_file is None:
        problems.append("--ns-cost file: needs --ns-cost-file")
    if ownership.ns_cost != "file" and ownership.ns_cost_file is not None:
        problems.append(f"--ns-cost-file {ownership.ns_cost_file}: needs --ns-cost file")
    if ownership.ns_cost_cache is not None and ownership.ns_cost != "measured":
        problems.append(f"--ns-cost-cache {ownership.ns_cost_cache}: needs --ns-cost measured")
    return problems


def check_experts(config: Config, context: RunContext) -> list[str]:
    """Routing needs experts to choose from, and a dense model none of it."""
    model, problems = config.model, []
    experts = model.num_experts
    if experts is None:
        if model.moe_shared_expert_intermediate_size is not None:
            problems.append(
                "--moe-shared-expert-intermediate-size"
                f" {model.moe_shared_expert_intermediate_size}: needs --num-experts"
            )
        return problems
    if model.moe_router_topk > experts:
        problems.append(
            f"--moe-router-topk {model.moe_router_topk}: above --num-experts {experts}; lower it"
        )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        problems.append("--moe-shared-expert-gate: needs --moe-shared-expert-intermediate-size")
    if not model.swiglu:
        problems.append(f"--num-experts {experts}: experts are gated MLPs; add --swiglu")
    if model.add_bias_linear:
        problems.append(
            f"--num-experts {experts}: experts have no biases; add --disable-bias-linear"
        )
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff > 0:
        problems.append(
            f"--moe-aux-loss-coeff {model.moe_aux_loss_coeff}: has no effect with"
            " --moe-router-load-balancing-type none; drop one of the two"
        )
    return problems
