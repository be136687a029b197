"""The order in which an engine makes and waits for collectives, as text.

Owns ``record``. Letters, each with the index of a layer group: g a gather starts, h it is waited
for, r a reduction starts, a its later stage is started, f its slots are waited for, w it is over;
Who records may add words of its own.
"""

from __future__ import annotations

from typing import Any

from megamuon.runtime import Runtime


def record(runtime: Runtime) -> list[str]:
    """Words for what ``runtime`` does from now on; the list grows."""
    engine, said = runtime.engine, []
    tables = {id(t): g.index for g in runtime.groups for t in (g.gather_table, g.reduce_table)}
    gather, reduce = engine.transport.all_gather_v, engine.reductions.reduce_unsharded

    def heard(letter: str, index: Any, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            said.append(f"{letter}{index}")
            return call(*args, **options)

        return run

    def all_gather_v(buffer: Any, table: Any) -> Any:
        said.append(f"g{tables[id(table)]}")
        return gather(buffer, table)

    def reduce_unsharded(slots: Any, table: Any, window: Any, **how: Any) -> Any:
        index = tables[id(table)]
        said.append(f"r{index}")
        work = reduce(slots, table, window, **how)
        for letter, name in (("a", "advance"), ("f", "free_unsharded"), ("w", "wait")):
            setattr(work, name, heard(letter, index, getattr(work, name)))
        return work

    engine.transport.all_gather_v = all_gather_v  # type: ignore[method-assign]
    engine.reductions.reduce_unsharded = reduce_unsharded
    for group in runtime.groups:
        waits = group.wait_gathered

        def wait_gathered(group: Any = group, waits: Any = waits) -> None:
            if group.gathering is not None:
                said.append(f"h{group.index}")
            waits()

        group.wait_gathered = wait_gathered  # type: ignore[method-assign]
    return said
