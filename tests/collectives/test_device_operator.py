"""When the device operators launch what: over a library and streams that write calls down."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.device_fabric import DeviceFabric
from megamuon.collectives.device_operator import DeviceGather, DevicePublish, DeviceReduce
from megamuon.collectives.operator_settings import ReadySettings


class Point:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name, self.over = calls, name, False

    def query(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.calls.append(f"wait for {self.name}")

    synchronize = wait


class WrittenStreams:
    """See Streams; the current stream's points are numbered."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.marks = calls, 0
        self.device = torch.device("cpu")
        self.ends = True

    def current(self) -> int:
        return 0

    def mark(self) -> Point:
        self.marks += 1
        return Point(self.calls, f"mark {self.marks}")

    def enter(self, name: str, after: Point | None = None) -> int:
        self.calls.append(f"{name} goes on after {after.name if after else 'now'}")
        return 1

    def leave(self, name: str, engine: object) -> Point:
        return Point(self.calls, name)

    def arrival(self, engine: object, parameters: Sequence[int], versions: Sequence[int]) -> Point:
        return Point(self.calls, "arrival")

    def memory(self, address: int, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def over_within(self, seconds: float) -> bool:
        self.calls.append(f"over within {seconds:g} s?")
        return self.ends

    def release_cache(self) -> None:
        self.calls.append("release the cache")


class WrittenEngine:
    """Rank 0 of two rows of one column; see DeviceEngine."""

    def __init__(self, calls: list[str]) -> None:
        self.rank, self.columns, self.handle, self.multimem = 0, 1, 0, False
        self.calls, self.tables = calls, 0

        def write(name: str, parameter: int | None = None) -> int:
            calls.append(name if parameter is None else f"{name} {parameter}")
            return 0

        self.call = SimpleNamespace(
            mmd_publish_parameters=lambda *_: 0,
            mmd_publish_begin=lambda *_: write("launch the round"),
            mmd_publish_task=lambda _, __, parameter, ___: write("task", parameter),
        )

    def operator(self, config: object, name: str) -> int:
        self.calls.append(f"make {name}")
        return 0

    def control_bytes(self, config: object) -> int:
        return 256

    def open(self, control: int, pool: int, pool_of: object = None) -> int:
        self.calls.append("open")
        return 1 << 20

    def gather_table(self, op: int, rows: object, name: str) -> int:
        self.tables += 1
        return self.tables - 1

    def upload(self) -> None:
        self.calls.append("upload")

    def gather(self, op: int, table: int, base: int, stream: int) -> None:
        self.calls.append(f"gather {table}")

    def check(self, result: int = 0) -> int:
        return result

    def error(self) -> str:
        return ""

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


def publisher() -> tuple[DevicePublish, list[str]]:
    calls: list[str] = []
    operator = DevicePublish(WrittenEngine(calls), "publish", WrittenStreams(calls))  # type: ignore[arg-type]
    operator.publish_parameters(
        nodes=[0, 1, 0], offsets=[0, 16, 32], nbytes=[16, 16, 16], names=["a", "b", "c"]
    )
    return operator, calls


def test_a_round_is_launched_after_its_last_task_and_starts_where_it_began() -> None:
    operator, calls = publisher()
    operator.publish_begin([2, 1, 0], 1)
    assert calls == []  # whatever synchronises the GPU now has nothing to wait for
    assert not operator.publish_round_done()
    operator.publish_task(2)
    assert calls == ["task 2"]
    operator.publish_task(0)
    assert calls == ["task 2", "task 0", "publish goes on after mark 1", "launch the round"]


def test_a_round_without_own_parameters_is_launched_at_once() -> None:
    operator, calls = publisher()
    operator.publish_begin([1], 1)
    assert calls == ["publish goes on after mark 1", "launch the round"]
    operator.publish_begin([], 2)
    assert calls[2:] == ["publish goes on after mark 2", "launch the round"]


def test_versions_grow() -> None:
    operator, _ = publisher()
    operator.publish_begin([1], 3)
    with pytest.raises(CollectiveError, match="version 3 after version 3"):
        operator.publish_begin([1], 3)


def test_a_round_that_was_given_up_is_not_waited_for() -> None:
    operator, calls = publisher()
    operator.publish_begin([0], 1)
    operator.publish_drain()
    assert calls == []


def table_of(operator: DeviceGather) -> int:
    return operator.all_gather_table(nodes=[0], columns=[0], offsets=[0], nbytes=[16], name="t")


def test_tables_are_uploaded_once_and_before_a_call_that_reads_them() -> None:
    calls: list[str] = []
    operator = DeviceGather(WrittenEngine(calls), "gather", WrittenStreams(calls))  # type: ignore[arg-type]
    first, second = table_of(operator), table_of(operator)
    operator.upload()
    operator.upload()
    operator.all_gather(second, 0)
    assert calls == ["upload", "gather goes on after now", "gather 1"]
    late = table_of(operator)
    operator.all_gather(first, 0)
    operator.all_gather(late, 0)
    assert [call for call in calls if call == "upload"] == ["upload"] * 2


def fabric_of(calls: list[str], ends: bool) -> DeviceFabric:
    """A fabric of one operator, without the making of communicators."""
    fabric = DeviceFabric.__new__(DeviceFabric)
    streams = WrittenStreams(calls)
    streams.ends = ends
    fabric.group, fabric.memory, fabric._streams = None, None, streams
    fabric.settings = ReadySettings(deadline=7)
    engine = WrittenEngine(calls)
    fabric._configs = {"reduce": SimpleNamespace()}
    fabric._engines = {"reduce": engine}
    fabric._operators = {"reduce": DeviceReduce(engine, "reduce", streams)}  # type: ignore[arg-type]
    return fabric


def test_a_pool_opens_after_torch_has_given_its_cache_back() -> None:
    calls: list[str] = []
    fabric_of(calls, True).open(1024)
    assert calls == ["release the cache", "open", "make reduce"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_fabric_closes_after_a_wait_with_a_limit(ends: bool) -> None:
    calls: list[str] = []
    fabric_of(calls, ends).close()
    assert calls == ["over within 7 s?", *([] if ends else ["abort"]), "close"]
