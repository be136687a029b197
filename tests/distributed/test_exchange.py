"""Pieces along the tp axis come together to whole matrices and go back, whatever the cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives.traffic import Traffic
from megamuon.matrices import Cut, Kind, Layout, LogicalParameter, Route
from megamuon.runtime.exchange import PieceExchange, cut_piece, sum_in_order
from tests.support.ranks import run_ranks

TP = 3
OWNERS = {"a": 2, "b": 0, "c": 2, "d": 1}


def parameter(name: str, shape: tuple[int, int], dim: int, bounds: tuple[int, ...]):  # noqa: ANN201
    return LogicalParameter(
        name=name,
        shape=shape,
        kind=Kind.MATRIX,
        route=Route.MATRIX,
        layout=Layout.OWNER,
        reason="test",
        cut=Cut(dim=dim, bounds=bounds),
    )


PARAMETERS = (
    parameter("a", (7, 4), 0, (0, 3, 6, 7)),
    parameter("b", (5, 8), 1, (0, 3, 6, 8)),
    parameter("c", (6, 2), 0, (0, 2, 4, 6)),
    parameter("d", (2, 9), 1, (0, 4, 8, 9)),
)


def whole(p: LogicalParameter) -> torch.Tensor:
    start = 100.0 * PARAMETERS.index(p)
    return torch.arange(start, start + p.numel, dtype=torch.float64).view(p.shape)


def work(rank: int, world: int) -> dict[str, object]:
    traffic = Traffic()
    exchange = PieceExchange(
        dist.group.WORLD,
        tp=world,
        tp_rank=rank,
        owner=lambda p: OWNERS[p.name],
        traffic=traffic,
    )
    pieces = [cut_piece(whole(p), p, rank).contiguous() for p in PARAMETERS]
    owned = exchange.to_owners(PARAMETERS, pieces)
    gathered = traffic.bytes("tp_gather")
    back = exchange.from_owners(PARAMETERS, {n: 2 * w for n, w in owned.items()}, pieces[0])
    everywhere = exchange.everywhere(PARAMETERS, pieces)
    parts = [torch.full((3,), 10.0**-rank), torch.full((2, 2), float(rank))]
    sum_in_order(parts, dist.group.WORLD)
    return {
        "owned": sorted(owned),
        "wholes": all(torch.equal(owned[p.name], whole(p)) for p in PARAMETERS if p.name in owned),
        "back": all(torch.equal(b, 2 * p) for b, p in zip(back, pieces, strict=True)),
        "everywhere": all(torch.equal(everywhere[p.name], whole(p)) for p in PARAMETERS),
        "sent": (gathered, traffic.bytes("tp_scatter")),
        "sums": [part.clone() for part in parts],
    }


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(work, TP)


def test_pieces_meet_on_the_owner_and_return(results: list[dict]) -> None:
    for rank, result in enumerate(results):
        assert result["owned"] == [name for name, owner in OWNERS.items() if owner == rank]
        assert result["wholes"] and result["back"] and result["everywhere"]


def test_each_piece_travels_once_each_way(results: list[dict]) -> None:
    """Counted bytes: a piece that stays on its rank is no traffic."""
    away = sum(
        p.piece_numel(rank) * 8 for p in PARAMETERS for rank in range(TP) if rank != OWNERS[p.name]
    )
    assert sum(result["sent"][0] for result in results) == away
    assert sum(result["sent"][1] for result in results) == away


def test_sums_have_the_same_bits_on_all_ranks(results: list[dict]) -> None:
    first = torch.full((3,), 1.0)
    for exponent in range(1, TP):
        first += torch.full((3,), 10.0**-exponent)
    for result in results:
        assert torch.equal(result["sums"][0], first)
        assert torch.equal(result["sums"][1], torch.full((2, 2), 3.0))


def test_one_rank_needs_no_group() -> None:
    alone = PieceExchange(None, tp=1, tp_rank=0, owner=lambda _: 0, traffic=Traffic())
    p = parameter("a", (7, 4), 0, (0, 7))
    assert torch.equal(alone.to_owners([p], [whole(PARAMETERS[0])])["a"], whole(PARAMETERS[0]))
    parts = [torch.ones(2)]
    sum_in_order(parts, None)
    assert torch.equal(parts[0], torch.ones(2))
