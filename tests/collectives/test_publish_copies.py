"""Leader copies and the publisher's rules on one replica, where nothing travels."""

from __future__ import annotations

import pytest
import torch

from megamuon.collectives.leader_copies import HEADER_BYTES, LeaderCopies, StaleCopyError
from megamuon.collectives.publish import Publisher
from megamuon.collectives.traffic import Traffic
from tests.support.copies import sized

SIZES = {4: 7, 2: 0, 9: 1000, 1: 1}
NAMES = {index: f"weight{index}" for index in SIZES}


def publisher(copies: LeaderCopies, *, ordered: bool = False) -> Publisher:
    replicas = dict.fromkeys(SIZES, 0)
    return Publisher(
        copies,
        names=NAMES,
        owner_replicas=replicas,
        group=None,
        replica=0,
        traffic=Traffic(),
        ordered=ordered,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_lie_apart_in_one_buffer(dtype: torch.dtype) -> None:
    copies = LeaderCopies(sized(SIZES, dtype), "cpu")
    for index, numel in SIZES.items():
        payload = copies.payload(index)
        assert (payload.shape, payload.dtype) == ((numel,), dtype)
        assert copies.message(index).numel() == HEADER_BYTES + numel * dtype.itemsize
        assert copies.version(index) == 0
        payload.fill_(index)
        copies.stamp(index, 10 * index)
    for index, numel in SIZES.items():  # after all of them were written
        assert torch.equal(copies.payload(index), torch.full((numel,), index, dtype=dtype))
        assert copies.version(index) == 10 * index
        if numel:
            assert copies.payload(index).data_ptr() % 16 == 0
    bound = sum(HEADER_BYTES + numel * dtype.itemsize for numel in SIZES.values())
    assert bound <= copies.resident_bytes == copies.buffer.numel() < bound + 16 * len(SIZES)


def test_a_message_carries_version_index_and_payload() -> None:
    source, target = (LeaderCopies(sized(SIZES, torch.float32), "cpu") for _ in range(2))
    source.payload(9).copy_(torch.arange(1000.0))
    source.stamp(9, 2**40 + 3)
    target.message(9).copy_(source.message(9))
    assert target.version(9) == 2**40 + 3
    assert target.headers([9, 4]).tolist() == [[2**40 + 3, 9], [0, 4]]
    assert torch.equal(target.payload(9), torch.arange(1000.0))


@pytest.mark.parametrize("ordered", [False, True])
def test_one_row_only_stamps_and_checks(ordered: bool) -> None:
    copies = LeaderCopies(sized(SIZES, torch.float32), "cpu")
    one = publisher(copies, ordered=ordered)
    one.expect([9, 4], 1)
    one.publish(9)
    one.wait([9, 1], {9: 1, 1: 0})
    with pytest.raises(StaleCopyError, match=r"weight4 \(parameter 4\).*version 0, wanted versi"):
        one.wait([4], {4: 1})
    one.publish(4)
    one.finish_round()
    one.wait([4], {4: 1})
    one.drain()
    assert one.pending() == 0
    assert one.traffic is not None and one.traffic.calls() == 0


def test_a_version_ahead_is_as_wrong_as_one_behind() -> None:
    copies = LeaderCopies(sized(SIZES, torch.float32), "cpu")
    one = publisher(copies)
    copies.stamp(4, 8)
    one.wait([4], {4: 8})
    with pytest.raises(StaleCopyError, match="holds version 8, wanted version 7"):
        one.wait([4], {4: 7})


def test_a_message_in_the_wrong_place_is_stale_whatever_its_version() -> None:
    copies = LeaderCopies(sized(SIZES, torch.float32), "cpu")
    one = publisher(copies)
    start = copies.message(4)[:HEADER_BYTES].view(torch.int64)
    start[1] = 9
    with pytest.raises(StaleCopyError, match="holds a message of parameter 9"):
        one.wait([4], {4: 0})


def test_what_the_publisher_refuses() -> None:
    one = publisher(LeaderCopies(sized(SIZES, torch.float32), "cpu"))
    with pytest.raises(ValueError, match="weight4: not expected at version 0"):
        one.publish(4)
    with pytest.raises(ValueError, match=r"parameters \[5\] are unknown or repeated"):
        one.expect([4, 5], 1)
    with pytest.raises(ValueError, match=r"parameters \[4, 4\] are unknown or repeated"):
        one.expect([4, 9, 4], 1)
    one.expect([4, 9], 1)
    one.publish(4)
    with pytest.raises(ValueError, match="weight4: .*published already"):
        one.publish(4)
    with pytest.raises(ValueError, match="never published version 1 of weight9"):
        one.finish_round()
    with pytest.raises(ValueError, match="never published version 1 of weight9"):
        one.expect([4], 2)
    one.abandon()
    one.expect([4], 2)


def test_tables_that_do_not_fit_are_refused() -> None:
    copies = LeaderCopies(sized({0: 4}, torch.float32), "cpu")
    with pytest.raises(
        ValueError, match="parameter 0 has a leader copy but no name or owner replica"
    ):
        Publisher(copies, names={0: "w"}, owner_replicas={}, group=None, replica=0)
    with pytest.raises(ValueError, match=r"w: owner replica 1 is outside 0\.\.0"):
        Publisher(copies, names={0: "w"}, owner_replicas={0: 1}, group=None, replica=0)
