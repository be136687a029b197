"""Engines and operators of the host library as Python objects.

Owns their handles.  Invariants: the memory that an engine works on (control words, pools) cannot be
unmapped while it lives, because it holds what keeps it mapped; a call that fails, or that comes
after or during ``close``, raises CollectiveError with the engine's text, and touches no memory
of an engine that is gone (C counts the threads inside and refuses later ones). Tables and
configurations are made once; a call converts a few integers and allocates nothing. Tested by
``tests/collectives/test_host_engine.py`` and ``test_host_engine_closing.py``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p, cast, create_string_buffer

import torch

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_library import (
    DTYPES,
    TEXT_BYTES,
    HostLibrary,
    array,
    library,
    native,
)
from megamuon.collectives.operator_settings import OPERATOR_KINDS, OperatorConfig

PATIENCE = 0.5  # seconds of a wait in C, between which Python looks at its signals


class HostEngine:
    """One per rank and process: a progress thread, and the operators that it steps."""

    def __init__(
        self,
        *,
        rank: int,
        control: Sequence[int],
        pids: Sequence[int],
        deadline: float,
        keep: object = None,
        using: HostLibrary | None = None,
    ) -> None:
        """``control``: addresses in this process of the ranks' control segments, ``pids`` their
        processes.  The engine holds ``keep`` (SymmetricMemory.mapped) until it is closed.
        ``deadline``: seconds that an operator may stand still.
        """
        ranks = len(control)
        if not 0 <= rank < ranks or len(pids) != ranks:
            raise ValueError(f"engine of rank {rank}: {ranks} control segments, {len(pids)} pids")
        self.rank = rank
        self.library = using or library()
        call = self.library.call
        handle = call.mm_engine_create(
            rank, ranks, array(c_void_p, control), array(c_int64, pids), deadline
        )
        if not handle:
            raise CollectiveError(f"rank {rank}: the engine over {ranks} ranks could not be made")
        self._handle: int = handle
        self._closed = False
        self._kept: list[object] = [keep]
        # Runs at close, when nothing refers to the engine any more, or when Python ends.
        self._destroy = weakref.finalize(
            self, _destroy, self.library, handle, self._kept, os.getpid()
        )

    @property
    def handle(self) -> int:
        """The C handle. Raises CollectiveError for an engine that is closed."""
        if self._closed:
            raise CollectiveError(f"rank {self.rank}: the engine is closed")
        return self._handle

    def operator(self, config: OperatorConfig, name: str) -> HostOperator:
        """Make an operator; all ranks make the same ones in the same order."""
        number = self.library.call.mm_operator_create(self.handle, native(config), name.encode())
        return KINDS[config.kind](self, self.check(number, f"operator {name}"), name)

    def abort(self, reason: str) -> None:
        """Make every wait of every rank fail with ``reason``."""
        self.library.call.mm_engine_abort(self.handle, reason.encode())

    def failed(self) -> bool:
        """Whether the ranks have lost each other: every call fails from then on."""
        return self.error().startswith("lost contact: ")

    def error(self) -> str:
        """Text of the first failure, or of the last refused call; "" while there is none."""
        return self._text(self.handle)

    def _text(self, handle: int) -> str:
        text = create_string_buffer(TEXT_BYTES)
        self.library.call.mm_engine_error(handle, text, TEXT_BYTES)
        return text.value.decode(errors="replace")

    def set_link(self, *, latency_ns: int, bytes_per_second: float) -> None:
        """Slow the puts down, for measurements; both 0: memory speed."""
        self.library.call.mm_engine_set_link(self.handle, latency_ns, bytes_per_second)

    def keep(self, held: object) -> None:
        """Hold an object until the engine is closed."""
        if all(held is not other for other in self._kept):
            self._kept.append(held)

    def check(self, result: int, what: str) -> int:
        """``result``, unless it says that the call failed."""
        if result < 0:
            text = self._text(self._handle)  # of an engine that was closed meanwhile, too
            raise CollectiveError(f"{what}: {text or 'failed and left no text'}")
        return result

    def close(self) -> None:
        """Stop the progress thread and let go of the memory; idempotent.

        Other threads that are inside a call leave it first, a wait with CollectiveError. Calls of
        other ranks may still need this one as a relay: close after a barrier. A rank that waits
        for a call that this one never made fails at once and names this one.
        """
        self._closed = True
        self._destroy()


def _destroy(of: HostLibrary, handle: int, kept: list[object], process: int) -> None:
    """In the process that made the engine: a forked child has the object but not the thread."""
    if os.getpid() == process:
        of.call.mm_engine_destroy(handle)
    kept.clear()


class HostOperator:
    """An operator of an engine."""

    def __init__(self, engine: HostEngine, number: int, name: str) -> None:
        """Made by ``HostEngine.operator``."""
        self.engine = engine
        self.number = number
        self.name = name
        self._call = engine.library.call

    def set_pool(self, bases: Sequence[int], *, keep: object = None) -> None:
        """Where this process sees the pool of each of the operator's ranks; held with ``keep``."""
        self.engine.keep(keep)
        addresses = array(c_void_p, bases)
        self._checked(self._call.mm_operator_set_pool(self._handle, self.number, addresses), "pool")

    def cursors(self) -> tuple[int, ...]:
        """Per queue: chunks sent, acknowledged, arrived, received."""
        count = self._checked(
            self._call.mm_operator_cursors(self._handle, self.number, None, 0), "cursors"
        )
        words = (c_uint64 * count)()
        self._call.mm_operator_cursors(self._handle, self.number, words, count)
        return tuple(words)

    @property
    def _handle(self) -> int:
        return self.engine.handle

    def _checked(self, result: int, what: str) -> int:
        return self.engine.check(result, f"{self.name}: {what}")

    def _patiently(self, what: str, call: Callable[..., int], *arguments: object) -> None:
        """Wait in C, a while at a time, so that Python sees its signals."""
        while (state := call(self._handle, self.number, *arguments, PATIENCE)) > 0:
            pass
        if state < 0:
            self._checked(state, what)


class HostCalls(HostOperator):
    """An operator whose calls return tickets; see operators.CallOperator."""

    def done(self, ticket: int) -> bool:
        """Whether this rank's part of a call is over and its result in place."""
        state = self._call.mm_done(self._handle, self.number, ticket)
        return bool(state if state >= 0 else self._checked(state, f"call {ticket}"))

    def wait(self, ticket: int) -> None:
        """Return when ``done`` would say yes."""
        self._patiently(f"call {ticket}", self._call.mm_wait, ticket)


class HostGather(HostCalls):
    """See operators.GatherOperator."""

    def all_gather_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        name: str,
    ) -> int:
        """Freeze a table: segment j is of owner (nodes[j], columns[j]), in bytes; its number."""
        count = _length(name, nodes, columns, offsets, nbytes)
        number = self._call.mm_all_gather_table(
            self._handle,
            self.number,
            count,
            array(c_int, nodes),
            array(c_int, columns),
            array(c_uint64, offsets),
            array(c_uint64, nbytes),
            name.encode(),
        )
        return self._checked(number, f"table {name}")

    def all_gather(self, table: int, base: int) -> int:
        """Start a gather of ``table`` at byte ``base`` of the pools; its ticket."""
        ticket = self._call.mm_all_gather(self._handle, self.number, table, base)
        return ticket if ticket >= 0 else self._checked(ticket, "all-gather")


class HostReduce(HostCalls):
    """See operators.ReduceOperator."""

    def reduce_scatter_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        numels: Sequence[int],
        windows: Sequence[int],
        slot_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        window_dtype: torch.dtype,
        name: str,
    ) -> int:
        """Freeze a table, in elements; ``windows`` lie in the owners' memory; its number."""
        count = _length(name, nodes, columns, offsets, numels, windows)
        number = self._call.mm_reduce_scatter_table(
            self._handle,
            self.number,
            count,
            array(c_int, nodes),
            array(c_int, columns),
            array(c_uint64, offsets),
            array(c_uint64, numels),
            array(c_uint64, windows),
            _dtype(slot_dtype, name),
            _dtype(wire_dtype, name),
            _dtype(window_dtype, name),
            name.encode(),
        )
        return self._checked(number, f"table {name}")

    def reduce_scatter(
        self, table: int, base: int, window_base: int, *, first: bool, divisor: float
    ) -> int:
        """Start a reduction: store (``first``) or add sum / ``divisor``; its ticket."""
        ticket = self._call.mm_reduce_scatter(
            self._handle, self.number, table, base, window_base, first, divisor
        )
        return ticket if ticket >= 0 else self._checked(ticket, "reduce-scatter")


class HostPublish(HostOperator):
    """See operators.PublishOperator."""

    def publish_parameters(
        self,
        *,
        nodes: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """Freeze the rail's list: owner node, place in every pool, size and name of each."""
        count = _length("parameters", nodes, offsets, nbytes, names)
        texts = array(c_char_p, [name.encode() for name in names])
        state = self._call.mm_publish_parameters(
            self._handle,
            self.number,
            count,
            array(c_int, nodes),
            array(c_uint64, offsets),
            array(c_uint64, nbytes),
            cast(texts, POINTER(c_char_p)),
        )
        self._checked(state, "parameters")

    def publish_begin(self, order: Sequence[int], version: int) -> None:
        """Open a round in which the parameters of ``order`` get ``version``."""
        parameters = array(c_int, order)
        state = self._call.mm_publish_begin(
            self._handle, self.number, len(order), parameters, version
        )
        self._checked(state, f"round {version}")

    def publish_task(self, parameter: int) -> None:
        """An own parameter's copy is written: send it."""
        if self._call.mm_publish_task(self._handle, self.number, parameter) < 0:
            self._checked(-1, f"parameter {parameter}")

    def publish_arrived(self, parameter: int) -> int:
        """The version that has wholly arrived in this rank's copy."""
        version = self._call.mm_publish_arrived(self._handle, self.number, parameter)
        if version == 0:  # the one answer that does not say whether the engine was closed meanwhile
            self.engine.handle  # noqa: B018  (raises)
        return version

    def publish_ready(self, parameters: Sequence[int], versions: Sequence[int]) -> bool:
        """Whether ``publish_wait`` would return at once."""
        return self.publish_other(parameters, versions) is None

    def publish_other(
        self, parameters: Sequence[int], versions: Sequence[int]
    ) -> tuple[int, int] | None:
        """Place in ``parameters`` and version of the first copy that holds another version; None
        if none does.
        """
        count = _length("parameters to compare", parameters, versions)
        which, needed = array(c_int, parameters), array(c_uint64, versions)
        place = self._call.mm_publish_compare(self._handle, self.number, count, which, needed)
        if place == -2:
            return None
        self._checked(place, "publish")
        return place, self.publish_arrived(parameters[place])

    def publish_wait(self, parameters: Sequence[int], versions: Sequence[int]) -> None:
        """Return when each of ``parameters`` has arrived in its version."""
        count = _length("parameters to wait for", parameters, versions)
        which, needed = array(c_int, parameters), array(c_uint64, versions)
        self._patiently("publish", self._call.mm_publish_wait, count, which, needed)

    def publish_drain(self) -> None:
        """Return when this rank's sends and relays of the round are over."""
        self._patiently("publish", self._call.mm_publish_drain)

    def publish_round_done(self) -> bool:
        """Whether this rank's part of the round is over."""
        state = self._call.mm_publish_round_done(self._handle, self.number)
        return bool(self._checked(state, "publish"))


KINDS: dict[str, type[HostOperator]] = dict(
    zip(OPERATOR_KINDS, (HostGather, HostReduce, HostPublish), strict=True)
)


def _length(what: str, *columns: Sequence[object]) -> int:
    """The common length of a table's columns: C would read beyond the end of a shorter one."""
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise ValueError(f"{what}: columns of different lengths {sorted(lengths)}")
    return lengths.pop()


def _dtype(dtype: torch.dtype, table: str) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"table {table}: {dtype} is none of {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]
