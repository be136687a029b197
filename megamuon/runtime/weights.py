"""Access to whole weights from outside: loading, reading, writing, averages.

Owns ``load_parameters``, ``gathered`` and ``swapped``, which both kinds of runtime offer as
methods. Invariants: what they write goes into masters, and from there to whoever keeps a copy;
ranks that were given different values, or names that do not fit, stop together and say which; when
a context ends the model trains as before it. Tested by ``tests/distributed/test_weights.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.checkpoint.tensors import StoredTensor, listed
from megamuon.matrices import LogicalParameter
from megamuon.mesh import Mesh
from megamuon.ownership.holdings import cut_names
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.module_buffers import ModuleBuffers
from megamuon.runtime.released import ReleasedWeightError, assign_data
from megamuon.runtime.replicas import agree_on_problem, check_replicas, digests


class Loadable(Protocol):
    """What loading asks of a runtime."""

    plan: OwnershipPlan
    mesh: Mesh
    buffers: ModuleBuffers
    world: dist.ProcessGroup | None

    def state(self, *, optimizer: bool = True, everywhere: bool = False) -> list[StoredTensor]: ...

    def loaded(self) -> None: ...

    def masters(self) -> list[Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class LoadedParameters:
    """What ``load_parameters`` left aside; both are empty where it was strict."""

    missing: tuple[str, ...]  # of the model, not given: as they were
    unexpected: tuple[str, ...]  # given, not of the model


@torch.no_grad()
def load_parameters(
    runtime: Loadable,
    values: Mapping[str, Tensor] | None,
    *,
    source_rank: int | None = None,
    strict: bool = True,
) -> LoadedParameters:
    """Fill weights and persistent buffers from whole tensors by name, as ``load_state_dict`` does.

    ``values``: on every rank the same, or on ``source_rank`` alone, from where they are sent one by
    one (the others give None).  A weight may go by any of its names. The optimizer's state stays.
    A collective. Raises ValueError on all ranks alike, before anything is written, for names that
    are missing or unexpected (with ``strict``), shapes that do not fit, and values that differ
    between ranks.
    """
    pieces: dict[str, list[StoredTensor]] = {}
    for piece in runtime.state(optimizer=False, everywhere=True):
        pieces.setdefault(piece.name, []).append(piece)
    names = _Names(runtime)
    given: dict[str, Tensor] = {}
    speaks = source_rank is None or runtime.mesh.rank == source_rank
    problem = None
    if speaks:
        given, problem = names.match(values, strict)
    agreed = agree_on_problem(problem, runtime.world)
    if agreed is not None:
        raise ValueError(f"load_parameters: {agreed}")
    unexpected = tuple(sorted(set(values or ()) - set(names.canonical))) if speaks else ()
    if source_rank is None:
        _check_alike(runtime, given)
        filled = set(given)
        for name, whole in given.items():
            _fill(pieces.get(name, ()), whole)
    else:
        filled, unexpected = _receive(runtime, given, unexpected, source_rank, pieces)
    runtime.loaded()
    missing = tuple(sorted(set(names.shapes) - filled))
    return LoadedParameters(missing=missing, unexpected=unexpected)


class _Names:
    """The names that weights and persistent buffers go by."""

    def __init__(self, runtime: Loadable) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}  # by canonical name
        self.canonical: dict[str, str] = {}
        for parameter in runtime.plan.parameters:
            self.shapes[parameter.name] = parameter.shape
            for name in (parameter.name, *parameter.aliases):
                self.canonical[name] = parameter.name
        for buffer in runtime.buffers:
            if buffer.persistent:
                self.shapes[buffer.name] = tuple(buffer.tensor.shape)
                self.canonical[buffer.name] = buffer.name
        for alias, name in runtime.buffers.aliases().items():
            if name in self.shapes:
                self.canonical[alias] = name

    def match(
        self, values: Mapping[str, Tensor] | None, strict: bool
    ) -> tuple[dict[str, Tensor], str | None]:
        """``values`` by canonical name, and what is wrong with them."""
        if values is None:
            return {}, "no values: give them on every rank, or source_rank= where they are"
        problems: list[str] = []
        found: dict[str, Tensor] = {}
        for name, value in values.items():
            canonical = self.canonical.get(name)
            if canonical is None:
                continue
            if not isinstance(value, Tensor) or value.is_meta:
                problems.append(f"{name} is no tensor with values")
            elif tuple(value.shape) != self.shapes[canonical]:
                problems.append(
                    f"{name} is {tuple(value.shape)}, the model's is {self.shapes[canonical]}"
                )
            elif canonical in found and not _equal(found[canonical], value):
                problems.append(f"{name} is another name of {canonical} and has other values")
            else:
                found[canonical] = value
        if strict:
            if unexpected := [name for name in values if name not in self.canonical]:
                problems.append(f"unexpected: {listed(unexpected)}")
            if missing := [name for name in self.shapes if name not in found]:
                problems.append(f"missing: {listed(missing)}")
        return found, "; ".join(problems[:6]) if problems else None


def _equal(first: Tensor, second: Tensor) -> bool:
    return first is second or torch.equal(first.to(second), second)


def _check_alike(runtime: Loadable, given: Mapping[str, Tensor]) -> None:
    """Raise ValueError where ranks were given different names or values."""
    if runtime.world is None:
        return
    everyone: list[list[str]] = [[]] * dist.get_world_size(runtime.world)
    dist.all_gather_object(everyone, sorted(given), group=runtime.world)
    if any(theirs != everyone[0] for theirs in everyone):
        raise ValueError(
            "load_parameters: the ranks were given different names; give all of them on every"
            " rank, or source_rank= where they are"
        )
    names = sorted(given)
    check_replicas(
        "given tensors",
        names,
        dict(zip(names, digests([given[name] for name in names]), strict=True)),
        mesh=runtime.mesh,
        group=runtime.world,
        device=runtime.mesh.device,
        advice="Give the same values on every rank, or source_rank= where they are",
    )


def _fill(pieces: Sequence[StoredTensor], whole: Tensor) -> None:
    for piece in pieces:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(piece.offset, piece.data.shape, strict=True)
        )
        piece.data.copy_(whole[place])


def _receive(
    runtime: Loadable,
    given: Mapping[str, Tensor],
    unexpected: tuple[str, ...],
    source_rank: int,
    pieces: Mapping[str, Sequence[StoredTensor]],
) -> tuple[set[str], tuple[str, ...]]:
    """One whole tensor at a time from ``source_rank``.  Returns the filled and unexpected names."""
    group, device = runtime.world, runtime.mesh.device
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in given.items()}
    if group is None:
        for name, whole in given.items():
            _fill(pieces.get(name, ()), whole)
        return set(given), unexpected
    source = dist.get_global_rank(group, source_rank)
    message: list[tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], tuple[str, ...]]]
    message = [(shapes, unexpected)]
    dist.broadcast_object_list(message, src=source, group=group)
    shapes, unexpected = message[0]
    for name, (shape, dtype) in shapes.items():
        if runtime.mesh.rank == source_rank:
            whole = given[name].detach().to(device).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(whole, src=source, group=group)
        _fill(pieces.get(name, ()), whole)
    return set(shapes), unexpected


@contextmanager
def swapped(runtime: Loadable, values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the model computes with ``values``, one for each of ``runtime.masters()``; after it,
    with its own weights again, bit for bit.  Every rank enters and leaves together.
    """
    masters = runtime.masters()
    problem = None
    if [tuple(v.shape) for v in values] != [tuple(m.shape) for m in masters]:
        problem = "swapped() takes one tensor for each of runtime.masters(), of its shape"
    problem = agree_on_problem(problem, runtime.world)
    if problem is not None:
        raise ValueError(problem)
    with torch.no_grad():
        kept = [master.clone() for master in masters]
        _copy(masters, values)
    runtime.loaded()
    try:
        yield
    finally:
        with torch.no_grad():
            _copy(masters, kept)
        runtime.loaded()


def _copy(masters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for master, value in zip(masters, values, strict=True):
        master.copy_(value)


# --- gathered ------------------------------------------------------------------------------------


class Shown:
    """Gathered parameters in the hands of a user: what changed, and whether alike on all ranks."""

    def __init__(
        self,
        tensors: Mapping[str, nn.Parameter],
        parameters: Sequence[LogicalParameter],
        mesh: Mesh,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._tensors = dict(tensors)
        self._cut = cut_names(parameters)
        self._mesh = mesh
        self._group = group
        self._before = self._now()

    def _now(self) -> dict[str, object]:
        tensors = [tensor.detach() for tensor in self._tensors.values()]
        kinds = [(tuple(t.shape), t.dtype) for t in tensors]
        found = zip(self._tensors, kinds, digests(tensors), strict=True)
        return {name: (kind, value) for name, kind, value in found}

    def changed(self, *, write: bool) -> dict[str, Tensor]:
        """What has other values than at the start, the same names on all ranks.  A collective.

        Raises ReleasedWeightError where something changed that was only to be read, where ranks
        wrote different values, and where a shape or dtype changed.
        """
        now = self._now()
        mine = {name: value for name, value in now.items() if value != self._before[name]}
        everyone = [(self._mesh.tp_rank, mine)]
        if self._group is not None:
            everyone = everyone * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, (self._mesh.tp_rank, mine), group=self._group)
        names = sorted({name for _, theirs in everyone for name in theirs})
        if names and not write:
            raise ReleasedWeightError(
                f"{listed(names)}: changed inside `with runtime.gathered():`, which only reads; use"
                " `with runtime.gathered(write=True):` to keep it"
            )
        for name in names:
            first: dict[int, object] = {}
            for rank, (tp_rank, theirs) in enumerate(everyone):
                value = theirs.get(name)
                if first.setdefault(tp_rank if name in self._cut else 0, value) != value:
                    raise ReleasedWeightError(
                        f"{name}: rank {rank} wrote other values than the ranks before it inside"
                        " `with runtime.gathered(write=True):`; write the same on every rank, or"
                        " use runtime.load_parameters(values, source_rank=0)"
                    )
            if now[name][0] != self._before[name][0]:  # type: ignore[index]
                raise ReleasedWeightError(f"{name} got another shape or dtype inside gathered()")
        return {name: self._tensors[name].detach() for name in names}


def show(group: LayerGroup, parameters: Mapping[str, nn.Parameter], copy: Tensor) -> None:
    """Let a group's parameters be views of ``copy (numel,)``, its whole weights, until ``hide``."""
    for parameter in group.parameters:
        start = group.weights.layout.offsets[parameter.name]
        shape = parameter.piece_shape(group.tp_rank)
        view = copy[start : start + parameter.piece_numel(group.tp_rank)].view(shape)
        assign_data(parameters[parameter.name], view)
    if group.guard is not None:
        group.guard.hold()


def hide(group: LayerGroup, parameters: Mapping[str, nn.Parameter]) -> None:
    """The parameters are views of the compute buffer again."""
    for parameter in group.parameters:
        shape = parameter.piece_shape(group.tp_rank)
        data = group.weights.raw_view(parameter.name, shape)
        assign_data(parameters[parameter.name], data)
    if group.guard is not None:
        group.guard.let_go()


def keep_changes(master: Tensor, shown: Tensor, sent: torch.dtype) -> None:
    """Take into ``master`` the elements of ``shown`` that differ from what was gathered of it in
    the dtype ``sent``: the others keep the digits that a narrower gather does not show.
    """
    with torch.no_grad():
        seen = master.to(sent).to(shown.dtype)
        master.copy_(torch.where(shown != seen, shown.to(master.dtype), master))


def names_under(model: nn.Module, module: nn.Module | None) -> set[int] | None:
    """Identities of the parameters under ``module``; None: all.  ValueError for a module that is
    not of the model.
    """
    if module is None or module is model:
        return None
    if not any(each is module for each in model.modules()):
        raise ValueError(f"gathered({type(module).__name__}): not a module of the sharded model")
    return {id(parameter) for parameter in module.parameters()}
