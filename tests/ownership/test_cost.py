"""Cost sources: closed form, file, measurement with a cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamuon.ownership import CostError, CostKey, closed_form_cost, file_cost, measured_costs
from megamuon.ownership.cost import H100_CONSTANTS

KEY = CostKey(device="device A", newton_schulz="quintic, 5 steps, bfloat16", torch_version="2.13.0")


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_closed_form_values() -> None:
    cost = closed_form_cost()
    square = 0.35 + 8 * 1024**3 / 2.5e11 + 36 * 1024**3 / 2e11
    assert cost(1024, 1024) == pytest.approx(square, rel=1e-12)
    wide = 0.35 + 8 * 1536**2 * 8960 / 2.5e11 + 36 * 1536**3 / 2e11
    assert cost(1536, 8960) == pytest.approx(wide, rel=1e-12)
    assert cost(8960, 1536) == cost(1536, 8960)


def test_closed_form_reads_its_constants_from_a_file(tmp_path: Path) -> None:
    constants = json.loads(H100_CONSTANTS.read_text(encoding="utf-8"))
    path = write(tmp_path / "slow.json", {**constants, "fixed_ms": 10.0})
    assert closed_form_cost(path)(64, 64) - closed_form_cost()(64, 64) == pytest.approx(9.65)


@pytest.mark.parametrize("value", [None, "0.35", 0, -1.0, True])
def test_closed_form_names_the_bad_constant(tmp_path: Path, value: object) -> None:
    constants = json.loads(H100_CONSTANTS.read_text(encoding="utf-8"))
    path = write(tmp_path / "bad.json", {**constants, "square_flops": value})
    with pytest.raises(CostError, match=r"bad\.json: constant square_flops"):
        closed_form_cost(path)


def test_file_cost_distinguishes_rows_and_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "times.json", [[[2, 3], 0.5], [[3, 2], 0.75]])
    cost = file_cost(path)
    assert (cost(2, 3), cost(3, 2)) == (0.5, 0.75)


def test_file_cost_names_every_missing_shape(tmp_path: Path) -> None:
    path = write(tmp_path / "times.json", [[[2, 3], 0.5]])
    with pytest.raises(CostError, match=r"times\.json.*2 shape\(s\): \[4, 5\], \[9, 9\]"):
        file_cost(path, [(9, 9), (2, 3), (4, 5)])
    with pytest.raises(CostError, match=r"times\.json.*\[4, 5\]"):
        file_cost(path)(4, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[", "not valid JSON"),
        ({"a": 1}, "must hold a list"),
        ([[[2, 3, 4], 1.0]], "entry 0"),
        ([[[2, 3], 1.0], [2, 3]], "entry 1"),
        ([[[2, 3], -1.0]], "no time of a matrix"),
        ("[[[2, 3], NaN]]", "no time of a matrix"),
        ([[[2, 0], 1.0]], "no time of a matrix"),
        ([[[2, 3], 1.0], [[2, 3], 2.0]], "also has 1.0"),
    ],
)
def test_file_cost_refuses_bad_files(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(CostError, match=message):
        file_cost(write(tmp_path / "times.json", content))


def test_file_cost_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"nowhere\.json"):
        file_cost(tmp_path / "nowhere.json")


class Clock:
    """A measuring function that counts its calls."""

    def __init__(self, scale: float = 1.0) -> None:
        self.calls: list[tuple[int, int]] = []
        self.scale = scale

    def __call__(self, shape: tuple[int, int]) -> float:
        self.calls.append(shape)
        return self.scale * shape[0] * shape[1]


def test_each_shape_is_measured_once_in_sorted_order() -> None:
    clock = Clock()
    cost = measured_costs([(4, 2), (1, 3), (4, 2)], measure=clock, key=KEY)
    assert clock.calls == [(1, 3), (4, 2)]
    assert cost(4, 2) == 8.0
    with pytest.raises(CostError, match=r"measurement on device A.*\[7, 7\]"):
        cost(7, 7)


def test_the_cache_saves_measuring_and_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "times.json"
    measured_costs([(4, 2)], measure=Clock(), key=KEY, cache_path=path)
    again = Clock()
    cost = measured_costs([(4, 2), (5, 5)], measure=again, key=KEY, cache_path=path)
    assert again.calls == [(5, 5)]
    assert cost(4, 2) == 8.0
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["entries"]
    assert entry == {
        "device": "device A",
        "newton_schulz": "quintic, 5 steps, bfloat16",
        "torch_version": "2.13.0",
        "milliseconds": [[[4, 2], 8.0], [[5, 5], 25.0]],
    }
    assert [file.name for file in path.parent.iterdir()] == ["times.json"]
    measured_costs([(6, 6)], measure=Clock(), key=KEY, cache_path=path)
    unused = Clock()
    measured_costs([(4, 2), (5, 5), (6, 6)], measure=unused, key=KEY, cache_path=path)
    assert unused.calls == []


@pytest.mark.parametrize("field", ["device", "newton_schulz", "torch_version"])
def test_another_key_measures_anew_and_keeps_the_first_entry(tmp_path: Path, field: str) -> None:
    path = tmp_path / "times.json"
    measured_costs([(4, 2)], measure=Clock(), key=KEY, cache_path=path)
    other = CostKey(**{**KEY.__dict__, field: "something else"})
    clock = Clock(scale=2.0)
    assert measured_costs([(4, 2)], measure=clock, key=other, cache_path=path)(4, 2) == 16.0
    assert clock.calls == [(4, 2)]
    unused = Clock()
    assert measured_costs([(4, 2)], measure=unused, key=KEY, cache_path=path)(4, 2) == 8.0
    assert unused.calls == []


def test_combine_is_called_once_whatever_the_cache_holds_and_its_result_is_stored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "times.json"
    seen: list[list[float]] = []

    def median(times: list[float]) -> list[float]:
        seen.append(times)
        return [time + 1 for time in times]

    measured_costs([(4, 2), (1, 1)], measure=Clock(), key=KEY, cache_path=path, combine=median)
    assert seen == [[1.0, 8.0]]
    cached = measured_costs([(4, 2), (1, 1)], measure=Clock(), key=KEY, cache_path=path)
    assert (cached(1, 1), cached(4, 2)) == (2.0, 9.0)
    measured_costs([(4, 2), (1, 1)], measure=Clock(), key=KEY, cache_path=path, combine=median)
    assert seen[1] == [2.0, 9.0]


def test_combine_must_keep_the_length() -> None:
    with pytest.raises(CostError, match="combining 1 .* returned 2"):
        measured_costs([(1, 1)], measure=Clock(), key=KEY, combine=lambda times: times * 2)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    with pytest.raises(CostError, match=r"\[2, 3\] on device A"):
        measured_costs([(2, 3)], measure=lambda shape: time, key=KEY)


@pytest.mark.parametrize(
    "content",
    [
        "{ truncated",
        "[]",
        '{"format": 99, "entries": []}',
        '{"format": 1, "entries": [{"device": "device A"}]}',
    ],
)
def test_a_damaged_cache_is_replaced_with_a_warning(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "times.json", content)
    with pytest.warns(UserWarning, match=r"times\.json"):
        cost = measured_costs([(4, 2)], measure=Clock(), key=KEY, cache_path=path)
    assert cost(4, 2) == 8.0
    unused = Clock()
    measured_costs([(4, 2)], measure=unused, key=KEY, cache_path=path)
    assert unused.calls == []


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    blocked = write(tmp_path / "file", "") / "times.json"
    with pytest.warns(UserWarning, match="cannot write"):
        cost = measured_costs([(4, 2)], measure=Clock(), key=KEY, cache_path=blocked)
    assert cost(4, 2) == 8.0
