"""What all matrix optimizers share: fresh state, its checks, and the update of whole matrices.

Owns ``MatrixRule``, the base of every ``MatrixOptimizer``, which leaves them their three steps and
the shapes of their state. Invariant: the keys and shapes of a matrix's state follow from its shape
and the configuration alone, so that a checkpoint can be loaded before the first step; counts are
0-d FP32 tensors on the CPU. Tested by ``tests/optim/test_pieces.py`` over every optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megamuon.optim.optimizer import Item, Whole, check_master

_CHUNK_ELEMENTS = 1 << 27  # bounds the temporaries (inputs and directions) of one batch


class MatrixRule(ABC):
    """A ``MatrixOptimizer`` but for its steps. See [Note: three steps of a matrix update]."""

    piece_names: tuple[str, ...]
    whole_names: tuple[str, ...]

    @property
    def state_names(self) -> tuple[str, ...]:
        """Keys of the state of a whole matrix."""
        return self.piece_names + self.whole_names

    @abstractmethod
    def prepare(self, item: Item) -> Tensor:
        """Advance the state beside the piece; the piece's part of the input, which the caller only
        reads (it may be the gradient or a state tensor itself).
        """

    @abstractmethod
    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        """The update of each whole matrix, of its shape, before scale and learning rate."""

    @abstractmethod
    def apply(self, item: Item, direction: Tensor) -> None:
        """Decay and update a piece with its part of the direction, which stays as it is."""

    @abstractmethod
    def piece_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each state tensor beside a piece of this shape; () for counts."""

    @abstractmethod
    def whole_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each state tensor of a whole matrix of this shape; () for counts."""

    def init_piece(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state beside a piece. ValueError for a dtype that masters cannot have."""
        check_master("of new state", parameter)
        shapes = self.piece_shapes(tuple(parameter.shape))
        return _zeros(shapes, parameter.dtype, parameter.device)

    def init_whole(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Fresh state of a whole (rows, cols) matrix."""
        return _zeros(self.whole_shapes(shape), dtype, device)

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state, of both kinds, for a parameter that is whole."""
        if parameter.ndim != 2:
            return self.init_piece(parameter)  # not a matrix: update says so, with its name
        whole = self.init_whole(tuple(parameter.shape), parameter.dtype, parameter.device)
        return {**self.init_piece(parameter), **whole}

    @torch.no_grad()
    def update(self, items: Sequence[Item], updated: Callable[[Item], None] | None = None) -> None:
        """One step for each whole item, in place; ``updated`` follows each item's change.

        ValueError, before anything changes, for a parameter or a logical shape that is not 2-D, and
        for state that ``init_state`` did not make. Gradients must be finite.
        """
        for item in items:
            self._check_item(item)
        for chunk in _chunks(items):
            wholes = [Whole(item.name, self.prepare(item), item.state) for item in chunk]
            directions = self.directions(wholes)
            for item, direction in zip(chunk, directions, strict=True):
                self.apply(item, direction)
                if updated is not None:
                    updated(item)

    def _check_item(self, item: Item) -> None:
        shape = tuple(item.parameter.shape)
        if len(shape) != 2 or len(item.logical_shape) != 2:
            raise ValueError(
                f"{type(self).__name__} item {item.name!r}: parameter {shape}, logical shape "
                f"{item.logical_shape}; both must be 2-D. Route it to AdamW, or pass the "
                "whole matrix, not a shard"
            )
        self.check_piece(item)
        self._check_state(item.name, item.state, self.whole_shapes(shape))

    def check_piece(self, item: Item) -> None:
        """ValueError unless the item's state is what ``init_piece`` makes."""
        self._check_state(item.name, item.state, self.piece_shapes(tuple(item.parameter.shape)))

    def check_whole(self, whole: Whole) -> None:
        """ValueError unless the state is what ``init_whole`` makes for the matrix."""
        shape = tuple(whole.matrix.shape)
        if len(shape) != 2:
            raise ValueError(
                f"{type(self).__name__} matrix {whole.name!r}: shape {shape} is not 2-D; put the "
                "pieces together to the logical shape first"
            )
        self._check_state(whole.name, whole.state, self.whole_shapes(shape))

    def _check_state(
        self, name: str, state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        for key, shape in shapes.items():
            tensor = state.get(key)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise ValueError(
                    f"{type(self).__name__} item {name!r}: state {key!r} is {found}, its shape "
                    f"should be {shape}; make it with init_state (or init_piece and init_whole)"
                )


def count_step(state: Mapping[str, Tensor], name: str) -> int:
    """Add 1 to a count and return it. It lies on the CPU: reading it waits for no device."""
    count = state[name]
    count += 1
    return int(count)


def _zeros(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        if shape
        else torch.zeros((), dtype=torch.float32)
        for name, shape in shapes.items()
    }


def _chunks(items: Sequence[Item]) -> Iterable[list[Item]]:
    """Items to update together: one shape each on CUDA, up to a bound on temporaries; one by one
    elsewhere, so that the temporaries are those of one matrix and stay in cache.
    """
    groups: dict[tuple[object, ...], list[Item]] = defaultdict(list)
    for index, item in enumerate(items):
        parameter = item.parameter
        alone = None if parameter.is_cuda else index
        groups[(tuple(parameter.shape), parameter.dtype, parameter.device, alone)].append(item)
    for group in groups.values():
        size = max(1, _CHUNK_ELEMENTS // max(1, group[0].parameter.numel()))
        for start in range(0, len(group), size):
            yield group[start : start + size]
