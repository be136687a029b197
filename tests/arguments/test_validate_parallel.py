"""Grids, tensor parallelism, lines and experts: what fits together, and what is said where not."""

from __future__ import annotations

import pytest

from megamuon.arguments.config import ConfigError
from tests.support.command_lines import parse, problems

MOE = "--num-experts 4 --swiglu --disable-bias-linear "
TP = "--tensor-model-parallel-size "

LINES = {"A": "--line A --optimizer adam", "B": "--line B", "C": "--line C", "D": "--line D"}
# Flags that hold on some lines only, and the lines: on the others they are refused by name.
HOLDS_ON = {
    "--fabric host": "D",
    "--ring-slots 4": "D",
    "--chunk-kib 32": "D",
    "--sharding hsdp --shard-size 2 --publish-tile-kib 64": "D",
    "--collective-deadline 5": "D",
    "--owner-unit-threshold 50": "CD",
    f"{MOE}--merge-experts": "CD",
    "--owner-byte-cap 2": "CD",
    "--no-owner-layer-spreading": "CD",
    "--no-owner-column-balance": "CD",
    "--sharding hsdp --shard-size 2 --publish sync": "CD",
    "--sharding hsdp --shard-size 2": "ABCD",
    "--gather-in-bf16": "BCD",
    "--zero-stage 1": "CD",
    "--zero-stage 2": "ABCD",
    "--grad-reduce-in-bf16 --gradient-reduction step": "ABCD",
    "--bf16": "ABCD",
    f"{TP}2 --sequence-parallel": "ABCD",
    "--clip-grad 0": "ABCD",
    "--log-num-zeros-in-grad": "ABCD",
    "--apply-wd-to-qk-layernorm": "ABCD",
    "--decoupled-lr 1e-3": "ABCD",
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("flags", HOLDS_ON)
def test_a_flag_has_its_effect_or_is_named(flags: str, line: str) -> None:
    """Refused where another result would come out, noted in the start-up lines where none would."""
    words = f"{LINES[line]} {flags}"
    name = next(word for word in flags.split()[::-1] if word.startswith("--"))
    if line in HOLDS_ON[flags]:
        assert not any(f"effect of {name}" in note for note in parse(words, world_size=4).notes)
        return
    try:
        said = parse(words, world_size=4).notes
    except ConfigError as error:
        said = error.problems
    assert any(name in text for text in said), said


# command line beyond the base, ranks, flags and values that the one problem must name
CONTRADICTIONS = [
    (TP + "3", 4, "--tensor-model-parallel-size 3", "4 ranks"),
    (TP + "0", 4, "--tensor-model-parallel-size 0", "at least 1"),
    ("--shard-size 2", 4, "--shard-size 2", "--sharding hsdp"),
    ("--sharding hsdp --shard-size 3", 4, "--shard-size 3", "4 data-parallel ranks"),
    (f"--sharding hsdp --shard-size 4 {TP} 2", 4, "--shard-size 4", "2 data-parallel ranks (4"),
    ("--sharding hsdp --zero-stage 1", 4, "--zero-stage 1", "--sharding hsdp"),
    (f"--num-attention-heads 2 {TP} 4", 4, "--num-attention-heads 2", "only 2 ranks"),
    (
        f"--group-query-attention --num-query-groups 2 {TP} 4",
        4,
        "--num-query-groups 2",
        "only 2 ranks",
    ),
    # Pieces of ceil(6 / 4) = 2 leave nothing for the fourth rank.
    (f"--num-attention-heads 6 --kv-channels 4 {TP} 4", 4, "--num-attention-heads 6", "3 ranks"),
    (f"--ffn-hidden-size 1 {TP} 2", 2, "--ffn-hidden-size 1", "only 1 ranks"),
    (f"{MOE}--moe-ffn-hidden-size 1 {TP} 2", 2, "--moe-ffn-hidden-size 1", "only 1 ranks"),
    (f"--seq-length 31 --sequence-parallel {TP} 2", 2, "--seq-length 31", "--sequence-parallel"),
    (f"--global-batch-size 6 {TP} 2", 4, "--global-batch-size 6", "2 data-parallel ranks"),
    ("--line A --optimizer muon", 2, "--line A", "--optimizer muon"),
    ("--line A --param-layout owner", 2, "--collectives fsdp2", "--param-layout even"),
    ("--collectives fsdp2", 2, "--collectives fsdp2", "owner, owner and muon"),
    ("--param-layout even", 2, "--param-layout even", "--matrix-update gather"),
    ("--matrix-update gather", 2, "--param-layout owner", "--matrix-update gather"),
    ("--line B --collectives ready", 2, "--collectives ready", "--param-layout owner"),
    ("--line A --collectives ready", 2, "--collectives ready", "--param-layout owner"),
    (
        "--line D --param-layout even --matrix-update gather",
        2,
        "--collectives ready",
        "not with even",
    ),
    (
        "--param-layout even --collectives ready --optimizer adam",
        2,
        "--collectives ready",
        "--collectives grouped",
    ),
    ("--line D --matrix-update gather", 2, "--param-layout owner", "--matrix-update gather"),
    ("--fabric shm", 2, "--fabric shm", "auto, host, nccl"),
    ("--ring-slots 0", 2, "--ring-slots 0", "at least 1"),
    ("--ring-slots 65", 2, "--ring-slots 65", "at most 64"),
    ("--chunk-kib 0", 2, "--chunk-kib 0", "at least 1"),
    ("--chunk-kib 1025", 2, "--chunk-kib 1025", "at most 1024"),
    ("--publish-tile-kib 0", 2, "--publish-tile-kib 0", "at least 1"),
    ("--collective-deadline 0", 2, "--collective-deadline 0.0", "above 0.0"),
    ("--collective-deadline inf", 2, "--collective-deadline inf", "finite"),
    ("--matrix-update none", 2, "--optimizer muon", "--matrix-update none"),
    ("--line B --matrix-update none --optimizer soap", 2, "--optimizer soap", "none"),
    ("--line M --sharding hsdp --shard-size 1", 2, "--sharding hsdp", "not applicable"),
    ("--line M --zero-stage 2", 2, "--zero-stage 2", "not applicable"),
    (f"--line M {TP} 2", 2, "--tensor-model-parallel-size 2", "not applicable"),
    ("--line M --param-layout even", 2, "--param-layout even", "not applicable"),
    ("--line B --zero-stage 1", 2, "--zero-stage 1", "--param-layout even"),
    ("--line A --optimizer adam --check-collective-order", 2, "--check-collective-order", "line A"),
    ("--line A --zero-stage 1", 2, "--zero-stage 1", "--param-layout even"),
    (MOE + "--moe-router-topk 5", 2, "--moe-router-topk 5", "--num-experts 4"),
    (MOE + "--moe-shared-expert-gate", 2, "--moe-shared-expert-gate", "intermediate-size"),
    ("--num-experts 4 --disable-bias-linear", 2, "--num-experts 4", "--swiglu"),
    ("--num-experts 4 --swiglu", 2, "--num-experts 4", "--disable-bias-linear"),
    (
        "--moe-shared-expert-intermediate-size 8",
        2,
        "--moe-shared-expert-intermediate-size 8",
        "--num-experts",
    ),
    (
        MOE + "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
        2,
        "--moe-aux-loss-coeff 0.1",
        "none",
    ),
    (MOE + "--moe-router-load-balancing-type sinkhorn", 2, "sinkhorn", "use aux_loss or none"),
    (MOE + "--expert-model-parallel-size 2", 2, "--expert-model-parallel-size 2", "refused"),
    (MOE + "--moe-expert-capacity-factor 0", 2, "--moe-expert-capacity-factor 0.0", "above 0"),
    ("--muon-tp-mode blockwise", 2, "--muon-tp-mode blockwise", "use duplicated"),
    ("--optimizer soap --soap-beta2 1", 2, "--soap-beta2 1.0", "below 1"),
    (
        "--optimizer shampoo --shampoo-precondition-frequency 0",
        2,
        "--shampoo-precondition-frequency 0",
        "at least 1",
    ),
]


@pytest.mark.parametrize(("words", "ranks", "first", "second"), CONTRADICTIONS)
def test_a_contradiction_is_a_problem_that_names_its_flags(words, ranks, first, second):
    found = [p for p in problems(words, world_size=ranks) if first in p and second in p]
    assert len(found) == 1, problems(words, world_size=ranks)


GOOD = [
    ("--sharding hsdp --shard-size 2", 4),
    (f"--sharding hsdp --shard-size 2 {TP} 2 --sequence-parallel --publish sync", 8),
    (f"{TP} 2 --zero-stage 2", 4),
    ("--zero-stage 1", 4),
    ("--sequence-parallel", 4),
    ("--line A", 4),
    ("--line A --sharding hsdp --shard-size 2", 4),
    (f"--line A --optimizer sgd --zero-stage 2 {TP} 2", 4),
    (f"--line B --sharding hsdp --shard-size 1 {TP} 2", 4),
    ("--line M --collectives per_owner", 4),
    ("--line M --collectives padded --owner-planner scope_greedy", 4),
    ("--param-layout even --optimizer adam", 4),
    ("--param-layout even --matrix-update gather", 4),
    ("--collectives grouped --param-layout even --matrix-update gather", 4),
    ("--line D", 4),
    (f"--line D --sharding hsdp --shard-size 2 {TP} 2 --sequence-parallel", 8),
    (f"--line D --zero-stage 2 {TP} 2", 4),
    ("--line D --zero-stage 1 --optimizer adam", 4),
    (MOE + "--line D --sharding hsdp --shard-size 2 --publish sync", 4),
    ("--line D --fabric host --ring-slots 1 --chunk-kib 1024 --publish-tile-kib 1", 4),
    ("--line M --collectives ready", 4),
    ("--line B --optimizer sgd --matrix-update none", 4),
    ("--optimizer normuon --normuon-beta2 0.9 --muon-momentum 0.9", 4),
    ("--optimizer soap --soap-variant fb", 4),
    (MOE + "--moe-router-topk 4 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm", 4),
    (MOE + "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate", 4),
    (MOE + "--moe-layer-freq 1 --moe-token-dispatcher-type alltoall --merge-experts", 4),
]


@pytest.mark.parametrize(("words", "ranks"), GOOD)
def test_good_command_lines_have_no_problem(words, ranks):
    assert not problems(words, world_size=ranks)


def test_all_contradictions_are_found_at_once():
    found = problems(f"--line M --zero-stage 1 --sharding hsdp --shard-size 3 {TP} 2", world_size=4)
    starts = {problem.split(":")[0] for problem in found}
    assert starts == {
        "--sharding hsdp",
        "--zero-stage 1",
        "--tensor-model-parallel-size 2",
        "--shard-size 3",
    }
    assert sum(problem.startswith("--zero-stage 1") for problem in found) == 2


@pytest.mark.parametrize(
    ("words", "local", "size"),
    [("", 4, 4), (TP + "2", 4, 2), (TP + "2", None, 4), ("--shard-size 2", 4, 2), ("", 1, 1)],
)
def test_a_row_is_a_node_unless_told_otherwise(words, local, size):
    parsed = parse(f"--sharding hsdp {words}", world_size=8, local_world_size=local)
    assert parsed.config.parallel.shard_size == size


def test_a_node_that_does_not_fit_is_named():
    (problem,) = problems("--sharding hsdp", world_size=8, local_world_size=3)
    assert problem.startswith("--shard-size 3 (the ranks of this node): does not divide the 8")
    (problem,) = problems(f"--sharding hsdp {TP} 2", world_size=6, local_world_size=3)
    assert "3 ranks of a node do not divide by --tensor-model-parallel-size 2" in problem


def test_batches_count_data_parallel_ranks():
    config = parse(TP + "2", world_size=8).config
    assert config.training.global_batch_size == 2 * 4


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--sequence-parallel", "--sequence-parallel: off without tensor parallelism"),
        ("--publish sync", "no effect of --publish"),
        ("--publish-tile-kib 64", "no effect of --publish-tile-kib, since there is one replica"),
        ("--line C --fabric host --chunk-kib 4", "grouped: no effect of --fabric, --chunk-kib"),
        ("--collectives p2p --ring-slots 4 --collective-deadline 9", "p2p: no effect of --ring"),
        ("--moe-router-topk 1 --merge-experts", "no effect of --merge-experts, --moe-router-topk"),
        ("--optimizer normuon --soap-eps 1e-9", "--optimizer normuon: no effect of --soap-eps"),
    ],
)
def test_flags_that_nothing_reads_are_noted(words, named):
    assert any(named in note for note in parse(words).notes)


def test_flags_of_operators_are_not_idle_under_line_d():
    words = "--sharding hsdp --shard-size 1 --fabric host --publish-tile-kib 64 --ring-slots 4"
    assert not [note for note in parse(words).notes if "no effect" in note]


def test_muon_flags_are_not_idle_under_normuon():
    assert not [n for n in parse("--optimizer normuon --ns-form gram").notes if "no effect" in n]


def test_an_expert_is_as_wide_as_the_mlp_unless_told_otherwise():
    model = parse(MOE + "--ffn-hidden-size 24").config.model
    assert model.moe_ffn_hidden_size == 24
    assert parse("--ffn-hidden-size 24").config.model.moe_ffn_hidden_size is None
