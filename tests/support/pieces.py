"""Whole tensors and random ways to cut them into pieces, for tests of checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from megamuon.checkpoint import StoredTensor


def wholes() -> dict[str, torch.Tensor]:
    """Named whole tensors of many shapes and dtypes: 0-d, empty, odd sizes, FP64, BF16, integers,
    a transposed view.
    """
    make = torch.Generator().manual_seed(0)
    return {
        "layers.0.q.weight": torch.randn(7, 5, generator=make),
        "layers.0.norm.weight": torch.randn(5, generator=make).bfloat16(),
        "layers.1.q.weight": torch.randn(5, 7, generator=make).t(),
        "embed.weight": torch.randn(11, 3, generator=make),
        "experts.weight": torch.randn(3, 4, 2, generator=make, dtype=torch.float64),
        "optimizer.step": torch.tensor(12.0),
        "optimizer.embed.step": torch.tensor(3, dtype=torch.int64),
        "optimizer.momentum": torch.randn(7, 5, generator=make, dtype=torch.float64),
        "optimizer.mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def stored(
    name: str,
    data: torch.Tensor,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
) -> StoredTensor:
    """A piece; the whole tensor where no offset is given."""
    return StoredTensor(
        name=name,
        shape=tuple(data.shape if shape is None else shape),
        offset=(0,) * data.ndim if offset is None else tuple(offset),
        data=data,
    )


def cut(tensors: dict[str, torch.Tensor], rank: int, world: int, seed: int) -> list[StoredTensor]:
    """This rank's pieces: by the seed, a tensor lies whole on a random owner, or in slices of a
    random dim.

    Slices are even (the rule of torch.chunk: last ranks may have an empty one) or at random cuts,
    two per rank.
    """
    choose = random.Random(seed)
    mine: list[StoredTensor] = []
    for name, whole in tensors.items():
        way, owner = choose.choice(("owner", "even", "ragged")), choose.randrange(world)
        if way == "owner" or whole.ndim == 0:
            if owner == rank:
                mine.append(stored(name, whole))
            continue
        dim = 0 if way == "even" else choose.randrange(whole.ndim)
        length = whole.shape[dim]
        if way == "even":
            step = -(-length // world)
            edges = [min(step * i, length) for i in range(world + 1)]
        else:
            edges = [0, *sorted(choose.randint(0, length) for _ in range(2 * world - 1)), length]
        for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            if number % world == rank:
                offset = [0] * whole.ndim
                offset[dim] = start
                part = whole.narrow(dim, start, stop - start)
                mine.append(stored(name, part, offset, whole.shape))
    return mine


def blank(pieces: Sequence[StoredTensor]) -> list[StoredTensor]:
    """The same pieces with other content, to be filled by a load."""
    return [
        stored(piece.name, torch.full_like(piece.data, 77), piece.offset, piece.shape)
        for piece in pieces
    ]


def same(first: Sequence[StoredTensor], second: Sequence[StoredTensor]) -> bool:
    """Whether two lists of pieces hold the same bits."""
    return len(first) == len(second) and all(
        a.name == b.name and a.data.dtype == b.data.dtype and torch.equal(a.data, b.data)
        for a, b in zip(first, second, strict=True)
    )
