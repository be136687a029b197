"""Whole runs on grids of four ranks: every line and layout trains as one process does, and takes up
what any other has saved.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import LOG_LINE, flags, use_launcher_variables

SHARED: dict[str, Any] = {
    "fp64": True,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 4,
    "eval_iters": 1,
}
HSDP = {"sharding": "hsdp", "shard_size": 2}
TP = {"tensor_model_parallel_size": 2}
REPLICAS_OF_TP = {**TP, "sharding": "hsdp", "shard_size": 1}
SAMPLE = {"sample_prompt": "abc", "sample_tokens": 3}
ADAM = {"optimizer": "adam", "lr": 1e-3}
MOE = {"model": "nano-moe"}

# name -> (reference, flags)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "hsdp": ("muon", {**HSDP, **SAMPLE}),
    "hsdp, synchronous publish, ZeRO-2": ("muon", {**HSDP, "publish": "sync", "zero_stage": 2}),
    "tensor parallel": ("muon", {**TP, "zero_stage": 2}),
    "sequence parallel": ("muon", {**TP, "sequence_parallel": True, **SAMPLE}),
    "replicas of tensor-parallel ranks": ("muon", REPLICAS_OF_TP),
    "line B": ("muon", {"line": "B"}),
    "line C": ("muon", {"line": "C"}),
    "line C, replicas": ("muon", {"line": "C", **HSDP}),
    "line B, replicas of tensor-parallel ranks": ("muon", {"line": "B", **REPLICAS_OF_TP}),
    "line M": ("muon", {"line": "M"}),
    "ZeRO-1": ("muon", {"zero_stage": 1}),
    "line A": ("adam", {**ADAM, "line": "A"}),
    "line A, replicas": ("adam", {**ADAM, "line": "A", **HSDP, "zero_stage": 2}),
    "line A, tensor parallel": ("adam", {**ADAM, "line": "A", **TP}),
    "AdamW on owners": ("adam", {**ADAM, **HSDP}),
    "SOAP": ("soap", {"optimizer": "soap", **REPLICAS_OF_TP}),
    "Shampoo": ("shampoo", {"optimizer": "shampoo", **TP}),
    "NorMuon": ("normuon", {"optimizer": "normuon", "line": "B"}),
    "experts, hsdp": ("experts", {**MOE, **HSDP}),
    "experts, tensor parallel": ("experts", {**MOE, **TP}),
    "experts, line B": ("experts", {**MOE, "line": "B", "merge_experts": True}),
}
REFERENCES: dict[str, dict[str, Any]] = {
    "muon": SAMPLE,
    "adam": ADAM,
    "soap": {"optimizer": "soap"},
    "shampoo": {"optimizer": "shampoo"},
    "normuon": {"optimizer": "normuon"},
    "experts": MOE,
}
# A run that saves after two steps, and one that goes on from there.
RESUMES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "hsdp, then sequence parallel": ("muon", HSDP, {**TP, "sequence_parallel": True}),
    "replicas of tensor-parallel ranks, then line M": ("muon", REPLICAS_OF_TP, {"line": "M"}),
    "line M, then line B on replicas": ("muon", {"line": "M"}, {"line": "B", **HSDP}),
    "line A on replicas, then owners": ("adam", {**ADAM, "line": "A", **HSDP}, {**ADAM, **TP}),
    "SOAP cut, then on replicas": (
        "soap",
        {"optimizer": "soap", **TP},
        {"optimizer": "soap", **HSDP},
    ),
    "line C on replicas, then line D": ("muon", {"line": "C", **HSDP}, HSDP),
    "experts cut, then on replicas": ("experts", {**MOE, **TP}, {**MOE, **HSDP}),
}


def run(changes: dict[str, Any]) -> tuple[int, str]:
    import pretrain_gpt

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pretrain_gpt.main(flags(**{**SHARED, **changes}))
    return code, output.getvalue()


def all_settings(rank: int, world: int) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    return {name: run(changes) for name, (_, changes) in SETTINGS.items()}


def all_resumes(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    found = {}
    for place, (name, (_, first, second)) in enumerate(RESUMES.items()):
        saved = {"save": folder / f"{place}", "save_interval": 2}
        before = run({**first, **saved, "exit_interval": 2})
        found[name] = (before, run({**second, "load": folder / f"{place}"}))
    adam = {"save": folder / "adam", "save_interval": 2, "exit_interval": 2}
    load = {"load": folder / "adam", "override_opt_param_scheduler": True}
    found["adam"] = (run({**ADAM, "line": "A", **adam}), run({**HSDP, **load}))
    found["back"] = (found["adam"][0], run({**ADAM, **load}))
    return found


def all_references(rank: int, world: int) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    return {name: run(changes) for name, changes in REFERENCES.items()}


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[int, str]]:
    return run_ranks(all_references, 1)[0]


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[int, str]]]:
    return run_ranks(all_settings, 4, timeout=500.0)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_resumes, 4, tmp_path_factory.mktemp("grid"), timeout=500.0)


def lines(text: str, field: str = "loss") -> list[float]:
    return [float(line[field]) for line in LOG_LINE.finditer(text)]


# SOAP's factors have more rows than gradients have directions here, so a part of each basis is
# whatever the last bits of a sum say, and Adam in that basis is another one then.
LOOSE = {"soap": 2e-2}


def same_curve(text: str, reference: str, start: int = 0, loose: float | None = None) -> None:
    """Losses and gradient norms of the lines are the reference's, from iteration ``start`` on."""
    fields = (("loss", 1e-6), ("norm", 1e-3)) if loose is None else (("loss", loose),)
    for field, steps in fields:
        expected = lines(reference, field)
        assert len(expected) == 4
        assert lines(text, field) == pytest.approx(expected[start:], rel=steps)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_grid_trains_as_one_process(
    name: str,
    results: list[dict[str, tuple[int, str]]],
    references: dict[str, tuple[int, str]],
) -> None:
    code, text = results[-1][name]
    assert code == 0, results[0][name][1][-3000:] + text[-3000:]
    reference = references[SETTINGS[name][0]]
    assert reference[0] == 0, reference[1][-3000:]
    loose = LOOSE.get(SETTINGS[name][0])
    same_curve(text, reference[1], loose=loose)
    blocks = [line for line in text.splitlines() if "loss at iteration" in line]
    expected = [line for line in reference[1].splitlines() if "loss at iteration" in line]
    assert len(blocks) == len(expected) == 2
    assert loose is not None or blocks == expected


def test_the_first_line_about_a_run_names_its_grid(results: list[dict[str, Any]]) -> None:
    assert (
        "line D | hsdp on 2 replicas of 1 ranks x 2 tensor-parallel | ZeRO-3 | layout owner,"
        " collectives ready, matrix update owner | publish async" in results[0]["SOAP"][1]
    )
    assert "collectives: ready on the host fabric, 2 nodes x 1 ranks in" in results[0]["SOAP"][1]
    assert "line C | fsdp on 4 ranks | ZeRO-3 |" in results[0]["line C"][1]
    assert "line A | fsdp on 2 ranks x 2 tens" in results[0]["line A, tensor parallel"][1]


def test_the_pool_opens_where_collectives_are_ready(results: list[dict[str, Any]]) -> None:
    for name, (_, changes) in SETTINGS.items():
        opened = "symmetric pool open: " in results[-1][name][1]
        assert opened == ("line" not in changes), name


def test_waiting_for_published_weights_is_in_the_line(results: list[dict[str, Any]]) -> None:
    assert results[-1]["hsdp"][1].count(" | publish wait (ms): ") == 4
    assert "publish wait" not in results[-1]["line M"][1]


def test_load_balancing_is_in_the_line_and_equal(
    results: list[dict[str, Any]], references: dict[str, tuple[int, str]]
) -> None:
    expected = lines(references["experts"][1], "balance")
    assert len(expected) == 4
    for name, (reference, _) in SETTINGS.items():
        if reference == "experts":
            found = lines(results[-1][name][1], "balance")
            assert found == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("name", ["hsdp", "sequence parallel"])
def test_all_ranks_sample_together(
    name: str, results: list[dict[str, Any]], references: dict[str, tuple[int, str]]
) -> None:
    def sample(text: str) -> str:
        return text[text.index("sample of 'abc'") :]

    assert sample(results[0][name][1]) == sample(references["muon"][1])


@pytest.mark.parametrize("name", RESUMES)
def test_a_run_goes_on_in_another_layout(
    name: str, resumed: list[dict[str, Any]], references: dict[str, tuple[int, str]]
) -> None:
    before, after = resumed[-1][name]
    assert (before[0], after[0]) == (0, 0), resumed[0][name][1][1][-3000:]
    reference = RESUMES[name][0]
    same_curve(after[1], references[reference][1], start=2, loose=LOOSE.get(reference))


def test_another_optimizer_keeps_the_weights(
    resumed: list[dict[str, Any]], references: dict[str, tuple[int, str]]
) -> None:
    before, after = resumed[-1]["adam"]
    assert (before[0], after[0]) == (0, 0), resumed[0]["adam"][1][1][-3000:]
    # The loss of the third step is that of the weights after two.
    assert lines(after[1])[0] == pytest.approx(lines(references["adam"][1])[2], rel=1e-6)
    text = resumed[0]["adam"][1][1]
    assert (
        "optimizer changed from adam to muon: weights are kept; the optimizer state of 21"
        " parameters is new, that of 17 goes on" in text
    )
    same_curve(resumed[-1]["back"][1][1], references["adam"][1], start=2)
