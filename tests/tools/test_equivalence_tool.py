"""tools/equivalence.py: its oracle is right, it builds the cases, and it notices faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from megamuon.models.moe import MoEBlock
from tests.support.reference import nano_config
from tools import equivalence
from tools.equivalence_ranks import Outcome
from tools.reference_training import (
    Training,
    _plain_experts,
    _plain_linear_maps,
    balance,
    batch_of,
    build_reference,
    is_matrix,
    model_config,
    place_of,
    reference_run,
)
from tools.sharded_training import Case, Difference, compare, not_applicable

SMALL = ["--steps", "2", "--ranks", "2", "--length", "4"]


def run(*arguments: str, capture: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    status = equivalence.main([*SMALL, *arguments])
    printed = capture.readouterr()
    return status, printed.out, printed.err


def options(*arguments: str) -> Any:
    return equivalence._checked(equivalence.build_parser(), arguments)


# --- the oracle ----------------------------------------------------------------------------------


def test_the_reference_trains_the_preset() -> None:
    plain, ours = nano_config(), model_config("nano")
    no_matter = ("max_position_embeddings", "attention_softmax_in_fp32", "norm_topk_prob")
    no_matter = (*no_matter, "grouped_backend")  # to a dense model on rotary positions
    assert replace(ours, **{name: getattr(plain, name) for name in no_matter}) == plain
    assert model_config("nano", recompute=True).recompute == nano_config(True).recompute
    assert model_config("gpt2").hidden_dropout == 0.0
    names = dict(build_reference(Training(model="nano-moe")).named_parameters())
    others = {n for n, p in names.items() if p.ndim == 2 and not is_matrix(n, p)}
    layers = [f"model.layers.{i}.mlp" for i in range(3)]
    assert others == {"model.embed_tokens.weight"} | {
        f"{path}.{gate}.weight" for path in layers for gate in ("gate", "shared_expert_gate")
    }


@pytest.mark.parametrize("name", ["nano-moe", "tiny-moe"])
@pytest.mark.parametrize("scope", ["model", "layer"])
def test_the_plain_experts_are_the_models(name: str, scope: str) -> None:
    """Gradients of the written-out mixture and balance equal those of the model's own code."""
    training = Training(model=name, batch=2, length=8)
    tokens, labels = batch_of(0, training)
    ours, plain = build_reference(training), build_reference(training)
    routed: list[torch.Tensor] = []
    for model in (ours, plain):
        model.config = replace(model.config, aux_loss_scope=scope, aux_loss_coefficient=0.3)
        for module in model.modules():
            if isinstance(module, MoEBlock):
                module.config = model.config
                if model is plain:
                    module.forward = _plain_experts(module, routed)  # type: ignore[method-assign]
    ours(tokens, labels=labels).mean().backward()
    with _plain_linear_maps():
        logits = plain(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (loss + 0.3 * balance(routed, plain.config)).backward()
    assert balance(routed, plain.config).item() == pytest.approx(ours.auxiliary_loss.item())
    mine = dict(ours.named_parameters())
    for name, parameter in plain.named_parameters():
        assert (parameter.grad - mine[name].grad).abs().max() < 1e-12, name


def test_parts_of_a_micro_batch_matter_to_experts_only() -> None:
    """A dense loss is a mean; the balance of experts is a product of means."""
    dense = [reference_run(Training(steps=2, places=n, accumulation=2))[2] for n in (1, 4)]
    assert all((dense[0][n] - dense[1][n]).abs().max() < 1e-12 for n in dense[0])
    experts = [reference_run(Training(model="nano-moe", steps=2, places=n))[1] for n in (1, 4)]
    assert abs(experts[0][0] - experts[1][0]) > 1e-9
    part = torch.arange(8)
    assert torch.equal(torch.cat([place_of(part, i, 4) for i in range(4)]), part)


def test_the_references_name_what_they_borrow() -> None:
    assert Training().borrowed is None and Training(optimizer="shampoo").borrowed


# --- the cases -----------------------------------------------------------------------------------


def test_combinations_that_do_not_exist_are_listed_with_the_reason() -> None:
    chosen = options(
        *(
            "--lines",
            "A,B,C,D,M",
            "--sharding",
            "fsdp,hsdp",
            "--zero-stage",
            "1,2,3",
            "--tp",
            "1,2,4",
        )
    )
    cases, missing = equivalence.build_cases(chosen)
    grid = {(c.line, c.replicas, c.shards, c.tp, c.zero_stage) for c in cases}
    grids = [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
    wanted = {(line, *shape, stage) for line in "ABCD" for shape in grids for stage in (2, 3)}
    wanted |= {(line, 1, *shape, 1) for line in "CD" for shape in ((4, 1), (2, 2))}
    wanted.add(("M", 1, 4, 1, 3))
    assert grid == wanted and len(cases) == len(wanted)
    reasons = {entry["case"]: entry["reason"] for entry in missing}
    assert "2 replicas" in reasons["line M nano hsdp 2x2 zero 3 tp 1 muon"]
    assert "tp 2" in reasons["line M nano fsdp 1x2 zero 3 tp 2 muon"]
    assert "baseline" in reasons["line B nano fsdp 1x4 zero 1 tp 1 muon"]
    assert "no replica" in reasons["line A hsdp tp 4"]
    assert "3 key/value groups" in reasons["line C nano fsdp 1x1 zero 3 tp 4 muon"]


def test_a_case_has_no_choices_that_do_not_concern_it() -> None:
    chosen = options(
        *("--lines", "B,C", "--sharding", "fsdp,hsdp", "--shard-size", "1,2,4"),
        *("--publish", "async,sync", "--sequence-parallel", "off,on", "--accumulation", "1,2"),
        *("--gradient-reduction", "micro-batch,step", "--recompute", "off,on"),
    )
    cases, _ = equivalence.build_cases(chosen)
    assert len(cases) == len({case.name for case in cases})
    # 2 replicas of 2 and 4 replicas of 1: both ways to publish for owners; one replica: none. Then
    # recompute, and 3 ways to accumulate.
    assert len([c for c in cases if c.line == "C"]) == (2 * 2 + 1) * 2 * 3
    assert len([c for c in cases if c.line == "B"]) == (2 + 1) * 2 * 3
    assert not any(case.sequence_parallel for case in cases)
    assert {case.training.batch for case in cases} == {8}
    lines = {c.line: c.reference.optimizer for c in equivalence.build_cases(options())[0]}
    assert lines == {"A": "adam", "B": "muon", "C": "muon", "D": "muon", "M": "muon"}
    experts = Case(line="C", shards=2, tp=2, training=Training(model="nano-moe", recompute=True))
    assert experts.reference.places == 2 and not experts.reference.recompute
    assert "divide" in str(
        not_applicable(
            Case(line="C", shards=1, tp=2, sequence_parallel=True, training=Training(length=15))
        )
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lines", "A,X"], "'X'"),
        (["--model", "nanno"], "nanno"),
        (["--batch", "6"], "--batch 6"),
        (["--tp", "0"], "0"),
        (["--ranks", "2,4"], "--ranks"),
        (["--lines", "M", "--tp", "2"], "no combination"),
        (["--lines", "B", "--collectives", "ready"], "no combination"),
    ],
)
def test_a_wrong_command_line_says_what(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        equivalence.main(arguments)
    assert stopped.value.code == 2 and named in capsys.readouterr().err


# --- verdicts ------------------------------------------------------------------------------------


def test_what_is_not_a_number_never_passes() -> None:
    case = Case(line="C", shards=1)
    weights = {"w": torch.ones(2)}
    same = compare(([1.0], [1.0], weights), ([1.0], [1.0], weights), None, 0)
    assert (same.loss, same.norm, same.weight) == (0.0, 0.0, 0.0)
    bad = compare(
        ([float("nan")], [1.0], {"w": torch.tensor([1.0, float("nan")])}),
        ([1.0], [1.0], weights),
        None,
        0,
    )
    outcome = Outcome(case=case, difference=bad)
    for tolerance in equivalence.TOLERANCES.values():
        assert any(text.startswith("loss") for text in tolerance.breaches(outcome))
    figures = equivalence.case_figures(outcome, equivalence.TOLERANCES["fp64"])
    assert not figures["passed"] and figures["max_relative_loss_difference"] is None
    json.dumps(figures, allow_nan=False)
    with pytest.raises(ValueError, match="other parameters"):
        compare(([], [], {}), ([], [], weights), None, 0)


def test_fp32_judges_losses_only() -> None:
    difference = Difference(loss=1e-5, norm=1.0, weight=1.0, weight_name="w", seconds=0.0)
    outcome = Outcome(case=Case(line="C", shards=1), difference=difference)
    assert not equivalence.TOLERANCES["fp32"].breaches(outcome)
    assert len(equivalence.TOLERANCES["fp64"].breaches(outcome)) == 3
    chosen = equivalence.tolerance_of(options("--dtype", "fp32", "--weight-tolerance", "0.5"))
    assert equivalence.Tolerance(loss=1e-4, norm=None, weight=0.5) == chosen


# --- whole runs ----------------------------------------------------------------------------------


def test_a_run_of_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    status, out, _ = run(
        "--sharding", "fsdp,hsdp", "--recompute", "--json", str(path), capture=capsys
    )
    document = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0 and document["passed"] is True
    assert [case["line"] for case in document["cases"]] == [*"AABBCCDD", "M"]
    for case in document["cases"]:
        assert case["passed"] is True and case["name"] in out and case["recompute"]
        assert 0 <= case["max_relative_loss_difference"] < 1e-9
        assert 0 <= case["max_weight_difference"] < 1e-9 and 0 <= case["max_norm_difference"] < 1e-9
    assert [entry["case"].split()[1] for entry in document["not_applicable"]] == ["M"]
    assert "not applicable: line M" in out and "9 of 9 cases passed" in out


def test_a_wrong_learning_rate_on_one_rank_is_a_breach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    status, out, err = run(
        *("--lines", "C,B", "--fault", "learning-rate", "--json", str(path)), capture=capsys
    )
    first, second = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert status == 1 and not first["passed"] and second["passed"]
    assert first["max_weight_difference"] > 1e-9
    assert any(text.startswith("weight difference") for text in first["breaches"])
    assert "FAILED" in out and first["name"] in err and second["name"] not in err


@pytest.mark.parametrize("fault", ["exception", "exit"])
def test_a_rank_that_fails_is_named_with_its_case(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    status, out, err = run(
        *("--lines", "C,B", "--fault", fault, "--json", str(path)), capture=capsys
    )
    first, second = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert status == 1 and second["passed"] and not first["passed"]
    assert first["max_weight_difference"] is None and first["name"] in err
    said = (
        "rank 0 died (exit code 3)" if fault == "exit" else "rank 0 failed: RuntimeError: a fault"
    )
    assert said in first["breaches"][0] and first["name"] in first["breaches"][0] and said in out
