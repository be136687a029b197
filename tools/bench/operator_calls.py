"""Bytes that a rank sends through the host fabric's operators, read off the operators' calls.

Owns ``OperatorCalls``, which goes with ``wire.count_bytes``: what torch dispatches is counted
there, what bypasses torch here. Invariant: a count comes from the tables that an operator was given
and from the calls that use them, never from a plan. Tested by ``tests/tools/test_lines.py``.

As everywhere, the volume of a call is what its algorithm needs: of a gather each rank's part once
for each rank that gets it; of a reduction what a rank contributes to owners of other columns, and
the sums of its replica that go along the rail to owners in others; of a publish an owner's
parameter once for each other replica. What relays pass on is not counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megamuon.collectives.host_engine import (
    HostEngine,
    HostGather,
    HostOperator,
    HostPublish,
    HostReduce,
)
from megamuon.collectives.operator_settings import OperatorConfig
from tools.bench.wire import ByteCounter, Call

Volumes = dict[str, int]  # operation -> bytes that this rank sends


class OperatorCalls:
    """Remembers the tables of all operators that are made while it watches."""

    def __init__(self) -> None:
        self.counter: ByteCounter | None = None  # who gets the calls, if anybody
        self._operators: dict[HostOperator, tuple[OperatorConfig, int]] = {}
        self._tables: dict[tuple[HostOperator, int], Volumes] = {}
        self._parameters: dict[HostOperator, list[int]] = {}

    @contextmanager
    def watch(self) -> Iterator[OperatorCalls]:
        """See all operators, tables and calls of this process until the block ends."""
        seen: dict[type, dict[str, Callable[..., None]]] = {
            HostEngine: {"operator": self._made},
            HostGather: {"all_gather_table": self._gather_table, "all_gather": self._called},
            HostReduce: {
                "reduce_scatter_table": self._reduce_table,
                "reduce_scatter": self._called,
            },
            HostPublish: {
                "publish_parameters": self._publish_list,
                "publish_task": self._published,
            },
        }
        originals = [(kind, name, getattr(kind, name)) for kind in seen for name in seen[kind]]
        for kind, name, original in originals:
            setattr(kind, name, _after(original, seen[kind][name]))
        try:
            yield self
        finally:
            for kind, name, original in originals:
                setattr(kind, name, original)

    @contextmanager
    def to(self, counter: ByteCounter) -> Iterator[None]:
        """Hand the calls inside the block to ``counter``."""
        self.counter = counter
        try:
            yield
        finally:
            self.counter = None

    # --- what operators are ----------------------------------------------------------------------

    def _made(self, operator: HostOperator, engine: HostEngine, config: Any, name: str) -> None:
        self._operators[operator] = (config, config.ranks.index(engine.rank))

    def _place(self, operator: HostOperator) -> tuple[int, int, int]:
        """Node and column of this rank, and how many ranks the operator has."""
        config, index = self._operators[operator]
        return *divmod(index, config.columns), len(config.ranks)

    def _gather_table(self, number: int, operator: HostOperator, **table: Any) -> None:
        node, column, ranks = self._place(operator)
        own = sum(
            nbytes
            for owner, side, nbytes in zip(
                table["nodes"], table["columns"], table["nbytes"], strict=True
            )
            if (owner, side) == (node, column)
        )
        self._tables[operator, number] = {operator.name: own * (ranks - 1)}

    def _reduce_table(self, number: int, operator: HostOperator, **table: Any) -> None:
        node, column, _ = self._place(operator)
        width = table["wire_dtype"].itemsize
        segments = list(zip(table["nodes"], table["columns"], table["numels"], strict=True))
        inside = sum(numel for _, side, numel in segments if side != column)
        across = sum(numel for owner, side, numel in segments if side == column and owner != node)
        self._tables[operator, number] = {
            f"{operator.name} inside": inside * width,
            f"{operator.name} across": across * width,
        }

    def _publish_list(self, _: None, operator: HostOperator, **listed: Any) -> None:
        self._parameters[operator] = list(listed["nbytes"])

    # --- calls -----------------------------------------------------------------------------------

    def _called(self, _: int, operator: HostOperator, table: int, *__: Any, **___: Any) -> None:
        self._record(operator, self._tables[operator, table])

    def _published(self, _: None, operator: HostOperator, parameter: int) -> None:
        rows = self._place(operator)[2]
        nbytes = self._parameters[operator][parameter] * (rows - 1)
        self._record(operator, {operator.name: nbytes})

    def _record(self, operator: HostOperator, volumes: Volumes) -> None:
        counter = self.counter
        if counter is None:
            return
        ranks = tuple(self._operators[operator][0].ranks)
        counter.calls += [
            Call(
                operation=f"ready {name}",
                group="",
                ranks=ranks,
                nbytes=nbytes,
                wire=nbytes,
                phase=counter.phase,
            )
            for name, nbytes in volumes.items()
        ]


def _after(original: Callable[..., Any], action: Callable[..., None]) -> Callable[..., Any]:
    """``original``, then ``action`` with its result and its arguments."""

    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action(result, *args, **kwargs)
        return result

    return method
