"""The bench of checkpoint writing: what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamuon.checkpoint import read_tensor
from tools.bench import checkpoint_write
from tools.bench.checkpoint_write import WAYS, Writing, figures_of, main, state_of, timed


def test_a_small_run_writes_its_figures_and_removes_its_files(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    figures = tmp_path / "figures.json"
    size = ["--mib", "1", "--repeats", "2", "--directory", str(disk)]
    main([*size, "--json", str(figures)])
    content = json.loads(figures.read_text(encoding="utf-8"))
    assert content["bytes"] >= 1 << 20
    for way in WAYS:
        assert content["seconds"][way] > 0
        assert content["bytes_on_disk"][way] > content["bytes"]  # all of it, and a header
    assert content["ours_over_dcp"] > 0 and content["ours_over_safetensors"] > 0
    assert list(disk.iterdir()) == []


def test_the_three_write_the_same_tensors(tmp_path: Path) -> None:
    state = state_of(1 << 20)
    for way in WAYS:
        checkpoint_write.WRITERS[way](state, tmp_path / way)
    plain = load_file(tmp_path / "safetensors" / "all.safetensors")
    assert plain.keys() == state.keys() and len(state) == 6
    for name, data in state.items():
        assert torch.equal(plain[name], data)
        assert torch.equal(read_tensor(tmp_path / "ours", 1, name), data)
    assert list((tmp_path / "dcp").glob("*.distcp"))


def test_ratios_are_those_of_each_round() -> None:
    seconds = {"ours": (1.0, 8.0, 3.0), "dcp": (2.0, 2.0, 3.0), "safetensors": (0.5, 4.0, 1.0)}
    writings = {
        way: [Writing(seconds=s, processor_seconds=2 * s) for s in found]
        for way, found in seconds.items()
    }
    figures = figures_of(writings, dict.fromkeys(WAYS, 9), 8)
    assert figures["ours_over_dcp"] == 1.0  # of 0.5, 4 and 1
    assert figures["ours_over_safetensors"] == 2.0
    assert figures["seconds"] == {"ours": 3.0, "dcp": 2.0, "safetensors": 1.0}
    assert figures["processor_seconds"]["ours"] == 6.0


def test_a_write_that_fails_is_raised() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        timed(full)


def test_sizes_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--mib", "0"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            main(flags)
        assert "--mib and --repeats are 1 or more" in capsys.readouterr().err
