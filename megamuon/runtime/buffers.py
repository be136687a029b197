"""Flat buffers of layer groups: memory is freed and allocated again behind views that stay valid.

Owns the placement of a group's parameters in one flat buffer and the buffer itself. Invariants: a
fusion block starts on 256 bytes and its members follow one another without a gap, so the fused
weight is a view; releasing shrinks the storage to zero and reviving refills the *same* storage, so
views that autograd saved come back to life; a buffer that is bound to memory of somebody else (the
symmetric pool) keeps its address for life, and releasing it says only that others may use its
range; every write goes through ``raw``, an alias with a version counter of its own, so autograd
never sees a saved view as modified. Tested by ``tests/runtime/test_buffers.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamuon.matrices import LogicalParameter

ALIGNMENT = 256  # bytes; what vectorised kernels and multicast stores of the transports want


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Where each parameter of a group starts in the flat buffer, in elements."""

    numel: int
    offsets: dict[str, int]


def place(parameters: Sequence[LogicalParameter], itemsize: int, tp_rank: int = 0) -> BufferLayout:
    """Put parameters (the pieces of ``tp_rank``) one after another, blocks aligned, members of a
    fusion block back to back.
    """
    blocks: dict[str, list[LogicalParameter]] = {}
    for parameter in parameters:
        blocks.setdefault(parameter.fusion or f"alone:{parameter.name}", []).append(parameter)
    step = max(1, ALIGNMENT // itemsize)
    end = 0
    offsets: dict[str, int] = {}
    for members in blocks.values():
        end = -(-end // step) * step
        for member in members:
            offsets[member.name] = end
            end += member.piece_numel(tp_rank)
    return BufferLayout(numel=end, offsets=offsets)


class FlatBuffer:
    """One flat tensor ``(numel,)`` with a storage that can be released and revived; alive at first,
    with undefined contents.
    """

    def __init__(self, layout: BufferLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._tensor = torch.empty(layout.numel, dtype=dtype, device=device)
        # `.data` gives an alias with its own version counter: writes through it stay invisible to
        # autograd, where a copy_ even on detach() would bump the counter that saved views share.
        self.raw: Tensor = self._tensor.data
        self.nbytes = layout.numel * dtype.itemsize
        self.alive = True
        self.bound = False  # a static view of memory that others use while this one is released
        # Told True before the buffer comes alive, False after it was released; None: nobody asks.
        self.watch: Callable[[bool], None] | None = None
        # Told after each release, whether the buffer was alive or not; None: nobody asks.
        self.released: Callable[[], None] | None = None
        self._aside: Tensor | None = None  # contents that wait elsewhere for their range

    def view(self, name: str, shape: Sequence[int]) -> Tensor:
        """The parameter's view, on the version counter that autograd watches."""
        return self._view(self._tensor, name, shape)

    def raw_view(self, name: str, shape: Sequence[int]) -> Tensor:
        """The parameter's view outside autograd."""
        return self._view(self.raw, name, shape)

    def raw_piece(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start..stop`` of the parameter ``(stop - start,)``, outside autograd."""
        offset = self.layout.offsets[name]
        return self._slice(self.raw, offset + start, offset + stop)

    def _view(self, tensor: Tensor, name: str, shape: Sequence[int]) -> Tensor:
        start = self.layout.offsets[name]
        return self._slice(tensor, start, start + math.prod(shape)).view(tuple(shape))

    def _slice(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """A view, also of a released buffer: torch checks bounds when a view is made, so the
        storage must be there for that moment.
        """
        if self.alive or self.bound:
            return tensor[start:stop]
        storage = tensor.untyped_storage()
        storage.resize_(self.nbytes)
        try:
            return tensor[start:stop]
        finally:
            storage.resize_(0)

    def bind(self, memory: Tensor) -> None:
        """Live in ``memory (numel,)`` of the same dtype from now on, released at first.  Views made
        before are views of the old storage: their holders must take new ones.
        """
        if memory.shape != self.raw.shape or memory.dtype != self.raw.dtype:
            raise ValueError(
                f"a buffer of {tuple(self.raw.shape)} {self.raw.dtype} cannot live in"
                f" {tuple(memory.shape)} {memory.dtype}"
            )
        self.release()
        self._tensor, self.raw = memory, memory.data
        self.bound = True

    def release(self) -> None:
        """Give the memory back, the contents are lost. Views must not be read until ``revive``:
        on the heap that would crash the process.
        """
        self._aside = None
        if self.alive:
            if not self.bound:
                self._tensor.untyped_storage().resize_(0)
            self.alive = False
            if self.watch is not None:
                self.watch(False)
        if self.released is not None:
            self.released()

    def revive(self) -> None:
        """Bring the storage back, with undefined contents, or with those that were set aside."""
        if self.alive:
            return
        if self.watch is not None:
            self.watch(True)
        if not self.bound:
            self._tensor.untyped_storage().resize_(self.nbytes)
        self.alive = True
        if self._aside is not None:
            self.raw.copy_(self._aside)
            self._aside = None

    def set_aside(self) -> None:
        """Release, but keep the contents on the heap for the next ``revive``."""
        aside = self.raw.clone()
        self.release()
        self._aside = aside

    @property
    def resident_bytes(self) -> int:
        """Bytes held on the heap right now."""
        return self.nbytes if (self.alive and not self.bound) or self._aside is not None else 0
