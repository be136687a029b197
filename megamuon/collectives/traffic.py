"""Bytes that this rank sends, counted by operation and axis.

Owns the count behind the byte figures of the benches and of the tests that compare them with the
formulas.  What is counted is the logical payload, each collective in the dtype that it sends:

* a gather: the segments that this rank holds, once for each other member of the group;
* a reduction: the bytes of this rank's contributions to the other members' segments;
* a publish: header and payload, once for each other replica;
* an all-reduce (the norm, the control bytes at a pass's end): a reduction and a gather of shares,
  ``2 (N-1) / N`` of its bytes;
* padding, where an operation pads (the ``padded`` transport), because it travels as well.

Not counted: what tensor parallelism sends inside the model's layers; bytes that stay on the rank,
protocol headers, retransmission, and what a library's algorithm adds on its own account (Gloo's and
NCCL's rings forward other ranks' data).  So the sum
over the ranks is the volume that the algorithm needs, and it compares with formulas such as
2(N-1)P.  Invariant: a count only grows until ``reset``. Tested by
``tests/collectives/test_traffic.py``.
"""

from __future__ import annotations

OPERATIONS = (
    "gather",
    "reduce",
    "publish",
    "norm",
    "tp_gradient",
    "matrix_gather",
    "matrix_scatter",
    "pass_end",
)
AXES = ("shard", "replicate", "tp", "data", "world")


class Traffic:
    """Bytes and calls by (operation, axis); an operation that moved nothing has no entry."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}  # bytes, calls

    def sent(self, operation: str, axis: str, nbytes: int) -> None:
        """Count one call that sends ``nbytes`` to other ranks.

        Raises ValueError for an unknown operation or axis and for a negative count.
        """
        _check(operation, axis)
        if nbytes < 0:
            raise ValueError(f"traffic of {operation} on {axis}: {nbytes} bytes is negative")
        count = self._counts.setdefault((operation, axis), [0, 0])
        count[0] += nbytes
        count[1] += 1

    def bytes(self, operation: str | None = None, axis: str | None = None) -> int:
        """Bytes sent so far; None means every operation or every axis."""
        return self._total(operation, axis, 0)

    def calls(self, operation: str | None = None, axis: str | None = None) -> int:
        """Calls counted so far; None means every operation or every axis."""
        return self._total(operation, axis, 1)

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """``{operation: {axis: {"bytes": b, "calls": c}}}`` in the order of OPERATIONS and AXES,
        for JSON.
        """
        result: dict[str, dict[str, dict[str, int]]] = {}
        for operation in OPERATIONS:
            for axis in AXES:
                if (operation, axis) in self._counts:
                    nbytes, calls = self._counts[operation, axis]
                    result.setdefault(operation, {})[axis] = {"bytes": nbytes, "calls": calls}
        return result

    def reset(self) -> None:
        """Start again at zero."""
        self._counts.clear()

    def _total(self, operation: str | None, axis: str | None, part: int) -> int:
        _check(operation, axis)
        return sum(
            count[part]
            for (held_operation, held_axis), count in self._counts.items()
            if operation in (None, held_operation) and axis in (None, held_axis)
        )


def _check(operation: str | None, axis: str | None) -> None:
    if operation is not None and operation not in OPERATIONS:
        raise ValueError(f"traffic operation {operation!r}: one of {', '.join(OPERATIONS)}")
    if axis is not None and axis not in AXES:
        raise ValueError(f"traffic axis {axis!r}: one of {', '.join(AXES)}")
