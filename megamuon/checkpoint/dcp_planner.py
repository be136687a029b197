"""Planners for torch.distributed.checkpoint that know pieces of whole tensors, whatever the
layout.

Owns the answer to "who writes and who reads which elements".  The planners of torch understand
DTensor and ShardedTensor only; an owner layout is neither, so pieces are plain local tensors and
these planners state their place.  Invariant: saving accepts only pieces that cover every tensor
exactly once over all ranks; loading fills every wanted element exactly once and, unless told
otherwise, wants every saved element.  Errors name the tensors. Tested by
``tests/checkpoint/test_store.py`` and ``tests/distributed/test_checkpoint_ranks.py``.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megamuon.checkpoint.chunks import Chunk, coverage, shared
from megamuon.checkpoint.ranks import CheckpointError
from megamuon.checkpoint.tensors import (
    StoredTensor,
    TensorIndex,
    check_coverage,
    listed,
    widens,
)


class PieceSavePlanner(SavePlanner):
    """Plans the save of this rank's pieces.  ``pieces`` may be empty."""

    def __init__(self, pieces: Sequence[StoredTensor]) -> None:
        self.pieces = pieces
        self.local = SavePlan([])

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the pieces come through the constructor, several of one name among
        them.
        """

    def create_local_plan(self) -> SavePlan:
        """One item per piece, empty ones too, so that every rank's idea of a shape is compared."""
        items = []
        for position, piece in enumerate(self.pieces):
            piece.check()
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.data.shape))
            data = TensorWriteData(
                chunk, TensorProperties(dtype=piece.data.dtype), torch.Size(piece.shape)
            )
            index = MetadataIndex(piece.name, torch.Size(piece.offset), position)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.local = SavePlan(items)
        return self.local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check what all ranks together save.  The plans go back empty: each rank keeps its own."""
        found: dict[str, tuple[int, TensorWriteData, list[Chunk]]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data, name = item.tensor_data, item.index.fqn
                assert data is not None  # every item of create_local_plan has it
                first_rank, first, chunks = found.setdefault(name, (rank, data, []))
                mine = (tuple(data.size), data.properties.dtype)
                theirs = (tuple(first.size), first.properties.dtype)
                if mine != theirs:
                    raise CheckpointError(
                        f"tensor {name}: rank {rank} saves shape {mine[0]} {mine[1]}, "
                        f"rank {first_rank} saves shape {theirs[0]} {theirs[1]}"
                    )
                chunks.append(Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        metadata = {}
        for name, (_, data, chunks) in found.items():
            check_coverage(name, tuple(data.size), chunks)
            stored = [
                ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                for chunk in chunks
                if chunk.numel
            ]
            metadata[name] = TensorStorageMetadata(data.properties, data.size, stored)
        return [SavePlan([]) for _ in all_plans], Metadata(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's pieces, without the empty ones."""
        items = [item for item in self.local.items if self._piece(item).data.numel()]
        return replace(self.local, items=items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor behind an item."""
        piece = self._piece(write_item)
        return piece.data.detach() if piece.read is None else piece.read()

    def _piece(self, write_item: WriteItem) -> StoredTensor:
        position = write_item.index.index
        assert position is not None  # set by create_local_plan
        return self.pieces[position]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What one rank wants of one tensor; sent to the coordinator."""

    name: str
    chunk: Chunk


class PieceLoadPlanner(LoadPlanner):
    """Plans the filling of this rank's pieces from the pieces on disk.

    ``strict``: a wanted tensor that is missing and a saved tensor that nobody wants are errors;
    names that start with one of ``ignore`` may go unwanted.  Without ``strict`` both are allowed;
    ``missing`` lists what was left as it was.  On the coordinator, ``found`` and ``unwanted`` list
    what all ranks together want of the saved names and what they do not.
    """

    def __init__(
        self,
        wanted: Sequence[StoredTensor],
        index: TensorIndex,
        *,
        source: str,
        strict: bool,
        ignore: Sequence[str],
    ) -> None:
        self.wanted = wanted
        self.index = index
        self.source = source
        self.strict = strict
        self.ignore = tuple(ignore)
        self.missing: list[str] = []
        self.found: list[str] = []
        self.unwanted: list[str] = []
        self.widened: set[str] = set()
        self.filled = [0] * len(wanted)
        self.local = LoadPlan([])

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: pieces and index come through the constructor."""

    def create_local_plan(self) -> LoadPlan:
        """One read per pair of a wanted and a saved piece that share elements."""
        self.missing = sorted({piece.name for piece in self.wanted} - set(self.index))
        if self.missing and self.strict:
            raise CheckpointError(
                f"{self.source} does not hold {listed(self.missing)}, which the model needs; "
                "load it with the model it was saved from, or leave the optimizer state out "
                "(--no-load-optim)"
            )
        reads, wishes = [], []
        for position, piece in enumerate(self.wanted):
            piece.check()
            if piece.name in self.index:
                self._compare(piece)
                wishes.append(Wish(name=piece.name, chunk=piece.chunk))
                reads.extend(self._reads(position, piece))
        self.local = LoadPlan(reads)
        return LoadPlan([], planner_data=wishes)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks together want everything that was saved."""
        chunks: dict[str, list[Chunk]] = {}
        for plan in global_plan:
            for wish in plan.planner_data:
                chunks.setdefault(wish.name, []).append(wish.chunk)
        self.found, self.unwanted = sorted(chunks), sorted(set(self.index) - set(chunks))
        unwanted = [name for name in self.unwanted if not name.startswith(self.ignore)]
        if unwanted and self.strict:
            raise CheckpointError(
                f"{self.source} holds {listed(unwanted)}, which no rank wants; load it with "
                "the model it was saved "
                "from, or name the tensors to be ignored"
            )
        for name, wanted in chunks.items():
            left = coverage(self.index[name].shape, wanted).missing
            if left and self.strict:
                raise CheckpointError(
                    f"{self.source}: tensor {name} of shape {self.index[name].shape}: "
                    f"no rank wants the elements {left[0]}"
                )
        return [LoadPlan([]) for _ in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """This rank's reads."""
        return self.local

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: only tensors are stored."""
        raise CheckpointError(f"{self.source}: {read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The view of the wanted piece that ``read_item`` fills."""
        view = self.wanted[self._position(read_item)].data.detach()
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Count what was filled."""
        self.filled[self._position(read_item)] += tensor.numel()

    def check_filled(self) -> int:
        """Elements filled on this rank.  Raises CheckpointError naming a piece that is not full."""
        for piece, filled in zip(self.wanted, self.filled, strict=True):
            if piece.name in self.index and filled != piece.data.numel():
                raise CheckpointError(
                    f"{self.source}: tensor {piece.name}: {filled} of {piece.data.numel()} "
                    "elements of the piece "
                    f"{piece.chunk} were filled"
                )
        return sum(self.filled)

    def _compare(self, piece: StoredTensor) -> None:
        saved = self.index[piece.name]
        fits = widens(saved.dtype, piece.data.dtype) or (
            piece.rounds and widens(piece.data.dtype, saved.dtype)
        )
        if tuple(piece.shape) != saved.shape or not fits:
            raise CheckpointError(
                f"{self.source}: tensor {piece.name} was saved with shape {saved.shape} "
                f"{saved.dtype}, "
                f"but the model has shape {tuple(piece.shape)} {piece.data.dtype}"
            )
        if not widens(piece.data.dtype, saved.dtype):
            self.widened.add(piece.name)

    def _reads(self, position: int, piece: StoredTensor) -> list[ReadItem]:
        reads = []
        for saved in self.index[piece.name].pieces:
            both = shared(piece.chunk, saved.chunk) if piece.data.numel() else None
            if both is None:
                continue
            reads.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(piece.name, torch.Size(piece.offset), position),
                    dest_offsets=_relative(both, piece.chunk),
                    storage_index=MetadataIndex(piece.name, torch.Size(saved.chunk.offset)),
                    storage_offsets=_relative(both, saved.chunk),
                    lengths=torch.Size(both.shape),
                )
            )
        return reads

    @staticmethod
    def _position(item: ReadItem) -> int:
        position = item.dest_index.index
        assert position is not None  # set by _reads
        return position


def _relative(chunk: Chunk, within: Chunk) -> torch.Size:
    return torch.Size(a - b for a, b in zip(chunk.offset, within.offset, strict=True))
