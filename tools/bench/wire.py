"""Collective calls of a rank and the bytes that they send, read off the calls themselves.

Owns ``count_bytes``. Invariant: a count comes from the tensors and split sizes of a call as torch
dispatches it, never from a plan or a table, so that a transport which sends too much is seen; an
operation without a rule is an error, not a zero. Tested by ``tests/tools/test_lines.py``.

The volume of a call (``nbytes``) is what its algorithm needs, as in
``megamuon/collectives/traffic.py``: each rank's part once for each rank that gets it; an all-reduce
is a reduction and a gather of shares. What is really sent (``wire``) may be more: Gloo reduces and
scatters by an all-reduce of everything, after which each rank drops what is not its own, so a
``reduce_scatter_tensor`` costs twice what it needs there; its ``reduce`` lets the root send a share
of its own. These rules are held against the bytes that the system says were written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective call of this rank."""

    operation: str  # as torch names it, without the trailing underscore
    group: str  # name of the process group
    ranks: tuple[int, ...]  # its global ranks
    nbytes: int  # that its algorithm sends to other ranks
    wire: int  # that this backend sends
    phase: str


class ByteCounter(TorchDispatchMode):
    """Records the collective calls of this thread; set ``phase`` to label them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.phase = ""

    def by_operation(self) -> dict[str, int]:
        """Number of calls of each operation."""
        return dict(Counter(call.operation for call in self.calls))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let the DTensor dispatch: its collectives come back here
        namespace, _, name = func._schema.name.partition("::")
        if namespace in NAMESPACES and "wait" not in name:
            self._record(name.rstrip("_"), dict(zip_arguments(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _record(self, operation: str, arguments: dict[str, Any]) -> None:
        if operation not in RULES:
            raise ValueError(f"no rule for the bytes of {operation}: add one to {__name__}")
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        place = (arguments, len(ranks), ranks.index(dist.get_rank()))
        nbytes = RULES[operation](*place)
        rule = GLOO.get(operation) if dist.get_backend(group) == "gloo" else None
        self.calls.append(
            Call(
                operation=operation,
                group=group.group_name,
                ranks=ranks,
                nbytes=nbytes,
                wire=nbytes if rule is None else rule(*place),
                phase=self.phase,
            )
        )


@contextmanager
def count_bytes() -> Iterator[ByteCounter]:
    """The collective calls of this thread inside the block."""
    counter = ByteCounter()
    with counter:
        yield counter


def zip_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments of a dispatched operation by their names in its schema."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, value
    yield from kwargs.items()


def _nbytes(value: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)


def _all_to_all(call: dict[str, Any], world: int, rank: int) -> int:
    whole = call["input"]
    splits = list(call["input_split_sizes"])
    if not splits:
        return _nbytes(whole) * (world - 1) // world
    row = whole.element_size() * (whole.numel() // whole.shape[0] if whole.shape[0] else 0)
    return (sum(splits) - splits[rank]) * row


def _all_reduce(call: dict[str, Any], world: int, rank: int) -> int:
    return 2 * (world - 1) * _nbytes(call["tensors"]) // world


# What a rank sends in a call: (arguments, ranks of the group, its rank in it) -> bytes.
RULES: dict[str, Callable[[dict[str, Any], int, int], int]] = {
    "alltoall_base": _all_to_all,
    "_allgather_base": lambda call, world, rank: (world - 1) * _nbytes(call["input_tensor"]),
    "allgather": lambda call, world, rank: (world - 1) * _nbytes(call["input_tensors"]),
    "_reduce_scatter_base": lambda call, world, rank: (world - 1) * _nbytes(call["output_tensor"]),
    "allreduce": _all_reduce,
    "broadcast": lambda call, world, rank: (
        (world - 1) * _nbytes(call["tensors"]) if rank == call["root_rank"] else 0
    ),
    "reduce": lambda call, world, rank: (
        _nbytes(call["tensors"]) if rank != call["root_rank"] else 0
    ),
    "send": lambda call, world, rank: _nbytes(call["tensors"]),
    "recv": lambda call, world, rank: 0,
    "barrier": lambda call, world, rank: 0,
}
# Where Gloo sends more, on CPU tensors.
GLOO: dict[str, Callable[[dict[str, Any], int, int], int]] = {
    "_reduce_scatter_base": lambda call, world, rank: (
        2 * (world - 1) * _nbytes(call["output_tensor"])
    ),
    "reduce": lambda call, world, rank: (
        _nbytes(call["tensors"])
        if rank != call["root_rank"]
        else _nbytes(call["tensors"]) * (world - 1) // world
    ),
}
