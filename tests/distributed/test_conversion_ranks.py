"""Two ranks start from a Hugging Face folder, train ten steps, and hand a folder back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.training import documents, flags, train, use_launcher_variables
from tools.convert_checkpoint import to_theirs
from tools.generate import read_model
from tools.hf_folders import write_folder

# Families whose tensors are views of ours, and layouts that cut them in owners and in slices.
RUNS = {"gpt2": "D", "qwen3_moe": "B"}


def ten_steps(rank: int, world: int, root: Path) -> list[int]:
    use_launcher_variables(rank, world)
    codes = []
    for family, line in RUNS.items():
        given = {"load": root / family, "save": root / f"{family}-run", "save_interval": 10}
        fixed = {"model": None, "eval_iters": 0, "train_iters": 10, "lr": 1e-3, "line": line}
        codes.append(train(flags(**fixed, **given)))
    return codes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folders")
    for family in RUNS:
        write_folder(made / family, family)
    assert run_ranks(ten_steps, 2, made) == [[0, 0], [0, 0]]
    return made


@pytest.mark.parametrize("family", sorted(RUNS))
def test_the_exported_folder_gives_our_logits(family: str, root: Path) -> None:
    import transformers

    assert documents(root / f"{family}-run", 10)["counters"]["iteration"] == 10
    ours, _ = read_model(root / f"{family}-run", 10, torch.device("cpu"))
    to_theirs(root / f"{family}-run", root / f"{family}-back", None, None)
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs, before = (read(root / name).eval() for name in (f"{family}-back", family))
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = ours.eval()(ids)
        assert (theirs(ids).logits - expected).abs().max() < 1e-5
        assert (before(ids).logits - expected).abs().max() > 1e-2
