"""What a line holds in memory: its tensors, and the peak of a step.

Owns the counting of resident bytes. Invariant: bytes are those of real storages, found by following
references, never derived from a plan; plan and formula are what ``lines.py`` compares them with.
Tested by ``tests/tools/test_footprint.py``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megamuon.runtime import Runtime


def reachable_tensors(root: object) -> Iterator[Tensor]:
    """Every tensor that ``root`` leads to through attributes, slots and containers.

    Enters objects of this package and containers only; of a module it takes parameters, their
    gradients and buffers (tables that a module computes for itself are no training state).
    """
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing.to_local() if isinstance(thing, DTensor) else thing
            with torch._C.DisableTorchFunctionSubclass():  # closed weights refuse to be asked
                waiting.append(thing.grad if thing.is_leaf else None)
            waiting.append(getattr(thing, "__dict__", None))
        elif isinstance(thing, nn.Module):
            waiting.extend([*thing.parameters(), *thing.buffers()])
        elif isinstance(thing, Mapping):
            waiting.extend([*thing.keys(), *thing.values()])
        elif isinstance(thing, str | bytes):
            continue
        elif isinstance(thing, Iterable) and type(thing).__module__ in ("builtins", "collections"):
            waiting.extend(thing)
        elif type(thing).__module__.startswith("megamuon."):
            waiting.append(getattr(thing, "__dict__", None))
            slots = getattr(type(thing), "__slots__", ())
            waiting.extend(getattr(thing, slot, None) for slot in slots)


def storage_bytes(tensors: Iterable[Tensor], outside: range = range(0)) -> int:
    """Bytes of the distinct storages behind ``tensors``; a released storage has none, and those
    that begin at an address in ``outside`` do not count.
    """
    with torch._C.DisableTorchFunctionSubclass():
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(s.nbytes() for s in storages.values() if s.data_ptr() not in outside)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Bytes of the segments that a rank on the host fabric shares with others, by what they are
    for; ``pool_at`` are the addresses of the pool, in which tensors of the runtime lie.
    """

    pool: int = 0  # the whole segment: leases, reduced gradients, gaps
    sharded: int = 0  # of it: this rank's own reduced gradients
    control: int = 0  # rings, cursors, flags
    pool_at: range = range(0)

    @property
    def leases(self) -> int:
        """What the pool has beyond this rank's reduced gradients."""
        return self.pool - self.sharded


def shared_of(runtime: object) -> Shared:
    """The segments of a runtime; nothing where no fabric is in use. Leader copies are tensors,
    which ``reachable_tensors`` finds.
    """
    transport = runtime.engine.transport if isinstance(runtime, Runtime) else None
    fabric = None if transport is None else transport.fabric
    if fabric is None:
        return Shared()
    memory, control = fabric.memory, fabric.control_bytes
    if memory is None:
        return Shared(control=control)
    at = memory.bases[memory.rank]
    return Shared(
        pool=memory.nbytes,
        sharded=sum(
            group.sharded_gradient.numel() * group.sharded_gradient.element_size()
            for group in runtime.groups
            if group.sharded_pooled
        ),
        control=control,
        pool_at=range(at, at + memory.nbytes),
    )


def peak_growth(action: Callable[[], object]) -> int:
    """How far the bytes of CPU tensors rise above their start while ``action`` runs.

    From the profiler's record of torch's own allocator, so activations, gathered weights, gradients
    and the send buffers of collectives are in it, for any system; what Gloo allocates is not.
    The process's resident size would not do: the allocator keeps what is freed.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    level = peak = 0
    for change in changes:
        level += int(change["args"]["Bytes"])
        peak = max(peak, level)
    return peak
