"""Another optimizer on another grid: weights are kept, so is what AdamW knows of norms and tables,
all other state begins anew, and the run says so.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.training import documents, flags, stored_tensors, use_launcher_variables

SHARED: dict[str, Any] = {
    "fp64": True,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "eval_iters": 0,
    "save_interval": 2,
}
HSDP = {"sharding": "hsdp", "shard_size": 2}
TP = {"tensor_model_parallel_size": 2}
ADAM = {"optimizer": "adam", "lr": 1e-3}
MOE = {"model": "nano-moe"}
NANO, EXPERTS = (21, 17), (66, 23)  # matrices, and what AdamW trains under every optimizer
# name -> flags that save, flags that load, the model's counts
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "line A on replicas, then Muon on cut slices": (
        {**ADAM, "line": "A", **HSDP},
        {"line": "B", **TP},
        NANO,
    ),
    "Muon on replicas, then SOAP cut": (HSDP, {"optimizer": "soap", **TP}, NANO),
    "Shampoo cut, then line M": ({"optimizer": "shampoo", **TP}, {"line": "M"}, NANO),
    "experts under line A, then Muon on replicas": (
        {**MOE, **ADAM, "line": "A"},
        {**MOE, **HSDP},
        EXPERTS,
    ),
    "Muon cut, then SGD": (TP, {"optimizer": "sgd", "line": "A", **HSDP}, NANO),
}


def run(changes: dict[str, Any]) -> tuple[int, str]:
    import pretrain_gpt

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pretrain_gpt.main(flags(**{**SHARED, **changes}))
    return code, output.getvalue()


def all_changes(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    found = {}
    for name, (first, second, *_) in CHANGES.items():
        before = run({**first, "train_iters": 2, "save": folder / name / "a"})
        places = {"load": folder / name / "a", "save": folder / name / "b"}
        # A rate that no weight notices, so that the weights can be compared afterwards.
        more = {"train_iters": 3, "override_opt_param_scheduler": True}
        found[name] = (before, run({**second, **places, **more, "lr": 1e-30}))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changes")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(all_changes, 4, folder, timeout=300.0)


@pytest.mark.parametrize("name", CHANGES)
def test_weights_stay_and_what_is_new_is_announced(
    name: str, results: list[dict[str, Any]], folder: Path
) -> None:
    first, second, (matrices, rest) = CHANGES[name]
    before, after = results[0][name]
    assert (before[0], after[0]) == (0, 0), before[1][-3000:] + after[1][-3000:]
    saved = stored_tensors(folder / name / "a", 2)
    end = stored_tensors(folder / name / "b", 3)
    weights = [tensor for tensor in saved if not tensor.startswith("optimizer.")]
    assert len(weights) == matrices + rest
    for tensor in weights:
        torch.testing.assert_close(saved[tensor], end[tensor], rtol=0, atol=1e-20)
    ours = second.get("optimizer", "muon")
    kept = 0 if ours == "sgd" else rest
    text = after[1]
    assert (
        f"  optimizer changed from {first.get('optimizer', 'muon')} to {ours}: weights are kept;"
        f" the optimizer state of {matrices + rest - kept} parameters is new, that of {kept} goes"
        " on" in text
    )
    unused = len(saved) - len(weights) - 3 * kept
    assert (
        f"  filled {len(weights)} of {len(weights)} weights and {3 * kept} optimizer tensors;"
        f" {unused} tensors of the checkpoint are not used, e.g. optimizer." in text
    )
    assert documents(folder / name / "b", 3)["counters"]["iteration"] == 3


@pytest.mark.parametrize("name", CHANGES)
def test_adamw_counts_on_and_everything_else_counts_anew(
    name: str, results: list[dict[str, Any]], folder: Path
) -> None:
    end = stored_tensors(folder / name / "b", 3)
    matrix = "model.layers.0.self_attn.o_proj.weight"
    ours = CHANGES[name][1].get("optimizer", "muon")
    if ours != "sgd":
        assert float(end["optimizer.step.model.norm.weight"]) == 3
        assert float(end["optimizer.step.model.embed_tokens.weight"]) == 3
    if ours == "soap":
        assert float(end[f"optimizer.step.{matrix}"]) == 1
    state = {tensor.split(".")[1] for tensor in end if tensor.endswith(matrix)} - {"model"}
    assert ("momentum_buffer" in state) == (ours in ("muon", "sgd"))
    assert ("exp_avg_sq" in state) == (ours == "soap")
