"""The comparison of lines C and D on GPUs, run on a CPU over a stand-in for the device library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamuon.collectives import fabric_choice as fabric
from tests.support.device_stand_in import stand_in_library
from tests.support.ranks import run_ranks
from tests.support.stand_in_streams import stand_in_parts
from tools.gpu_training import compare_lines, main
from tools.sharded_training import Difference


def _compare(rank: int, world: int, library: Path) -> Difference:
    fabric.device_parts = lambda device: stand_in_parts(library)
    with pytest.raises(ValueError, match="--rows 3 does not divide 2 ranks"):
        compare_lines(rank, world, 3, torch.device("cpu"))
    return compare_lines(rank, world, 1, torch.device("cpu"))


@pytest.mark.slow
def test_both_lines_train_and_are_compared() -> None:
    for found in run_ranks(_compare, 2, stand_in_library()):
        assert (found.loss, found.norm, found.weight) == (0.0, 0.0, 0.0)
        assert found.weight_name


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 3
    assert "there is no GPU here, nothing was trained" in capsys.readouterr().out
