"""Splits beyond the golden cases: rounding and errors."""

from __future__ import annotations

import pytest

from megamuon.data.splits import normalize, parse_split, split_bounds


def test_bankers_rounding() -> None:
    # 0.5 * 5 = 2.5 goes to the even 2, and 0.5 * 7 = 3.5 to the even 4.
    assert split_bounds("1,1", 5)[:2] == ((0, 2), (2, 5))
    assert split_bounds("1,1", 7)[:2] == ((0, 4), (4, 7))


def test_bounds_are_disjoint_and_cover() -> None:
    for count in range(1, 300):
        ranges = [part for part in split_bounds("969,30,1", count) if part is not None]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == count
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "0,0,0", "1.2.3"])
def test_bad_splits_name_the_flag(text: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


def test_bad_weights() -> None:
    for weights in ([-1.0, 2.0], [float("nan")], [], [0.0]):
        with pytest.raises(ValueError, match="here"):
            normalize(weights, "here")
