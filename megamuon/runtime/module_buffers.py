"""The buffers of a model: what it keeps beside its parameters.

Owns their way through a run: materialised from the meta device, placed where the model trains,
compared over ranks, saved and loaded. Invariants: after ``prepare`` no buffer is on the meta device
or elsewhere than the model, and all ranks hold equal values; a checkpoint has the persistent ones,
whole, under their names in ``state_dict``, as the first rank has them. Tested by
``tests/distributed/test_module_buffers.py``.

Buffers that differ at the start are an error and not broadcast from rank 0, as DDP would: a rank
that has built another model than its peers should not go unnoticed, and what is meant to differ
is no state of the model. During training each rank keeps its own running statistics, as under
FSDP2, and a checkpoint takes those of the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.checkpoint.tensors import StoredTensor
from megamuon.mesh import Mesh
from megamuon.runtime.replicas import check_replicas, digests

# Methods by which torch's modules, and those that follow them, fill their own buffers.
RESETS = ("reset_buffers", "reset_running_stats", "reset_parameters")


@dataclass(frozen=True, kw_only=True)
class HeldBuffer:
    """One buffer under its first name. The module may replace its tensor at any time."""

    name: str
    module: nn.Module
    attribute: str
    persistent: bool

    @property
    def tensor(self) -> Tensor:
        """The present tensor."""
        value = self.module._buffers[self.attribute]
        assert value is not None
        return value


class ModuleBuffers:
    """All buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __iter__(self) -> Iterator[HeldBuffer]:
        """Each tensor once, under the first of its names."""
        seen: set[int] = set()
        for path, module in self._model.named_modules():
            for attribute, tensor in module._buffers.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                yield HeldBuffer(
                    name=f"{path}.{attribute}" if path else attribute,
                    module=module,
                    attribute=attribute,
                    persistent=attribute not in module._non_persistent_buffers_set,
                )

    def texts(self) -> dict[str, str]:
        """What must be equal on all ranks before values can be compared."""
        return {
            "buffers": " ".join(
                f"{b.name}:{tuple(b.tensor.shape)}:{b.tensor.dtype}:{'meta' * b.tensor.is_meta}"
                for b in self
            )
        }

    def prepare(self, *, mesh: Mesh, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Materialise, place and compare.  A collective.

        Raises ValueError for a buffer on the meta device that no method of its module fills, and
        ReplicaMismatchError where ranks differ.
        """
        self._materialise(device)
        self._place(device)
        held = list(self)
        check_replicas(
            "buffers",
            [buffer.name for buffer in held],
            dict(
                zip(
                    [buffer.name for buffer in held],
                    digests([buffer.tensor for buffer in held]),
                    strict=True,
                )
            ),
            mesh=mesh,
            group=group,
            device=device,
            advice="Build the same model on all ranks (the same seed, no rank's own data); what is"
            " meant to differ belongs into a plain attribute",
        )

    def _materialise(self, device: torch.device) -> None:
        """Fill what is on the meta device by its module's own method."""
        waiting: dict[nn.Module, list[HeldBuffer]] = {}
        for buffer in self:
            if buffer.tensor.is_meta:
                waiting.setdefault(buffer.module, []).append(buffer)
        for module, buffers in waiting.items():
            for buffer in buffers:
                module._buffers[buffer.attribute] = _unfilled(buffer.tensor, device)
            reset = _reset_of(module)
            if reset is not None:
                with torch.no_grad(), torch.device(device):
                    getattr(module, reset)()
            for buffer in buffers:
                if reset is None or not _filled(buffer.tensor):
                    tried = f"{reset}() left it unfilled" if reset else f"none of {_listed()} there"
                    raise ValueError(
                        f"the buffer {buffer.name} is on the meta device and"
                        f" {type(module).__name__} cannot fill it ({tried}): give the module a"
                        " reset_buffers() that does, or build the model with real buffers"
                    )

    def _place(self, device: torch.device) -> None:
        placed: dict[int, Tensor] = {}
        for module in self._model.modules():
            for attribute, tensor in module._buffers.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    # A copy where elements share memory (an expanded tensor): a load writes them.
                    whole = tensor.is_contiguous() or 0 not in tensor.stride()
                    moved = (tensor if whole else tensor.contiguous()).to(device)
                    placed[id(tensor)] = moved
                module._buffers[attribute] = placed[id(tensor)]

    def stored(self, *, everywhere: bool, speaks: bool) -> list[StoredTensor]:
        """The persistent buffers as pieces of a checkpoint, whole: listed by the rank that
        ``speaks``, or with ``everywhere`` by all.
        """
        if not (everywhere or speaks):
            return []
        return [
            StoredTensor(
                name=buffer.name,
                shape=tuple(buffer.tensor.shape),
                offset=(0,) * buffer.tensor.ndim,
                data=buffer.tensor.detach(),
            )
            for buffer in self
            if buffer.persistent
        ]

    def aliases(self) -> dict[str, str]:
        """Further names of persistent buffers, each with the name that it is stored by."""
        first = {id(buffer.tensor): buffer.name for buffer in self}
        found = {}
        for name, tensor in self._model.named_buffers(remove_duplicate=False):
            if first.get(id(tensor), name) != name:
                found[name] = first[id(tensor)]
        return found


def buffers_without_reset(model: nn.Module) -> Iterator[str]:
    """Names of the buffers on the meta device that no method of their module would fill."""
    for buffer in ModuleBuffers(model):
        if buffer.tensor.is_meta and _reset_of(buffer.module) is None:
            yield buffer.name


def _reset_of(module: nn.Module) -> str | None:
    """The method that fills the module's buffers; one that would fill parameters too only where
    those wait to be filled by others.
    """
    for name in RESETS:
        if callable(getattr(module, name, None)):
            real = any(not parameter.is_meta for parameter in module.parameters(recurse=False))
            if name != "reset_parameters" or not real:
                return name
    return None


def _listed() -> str:
    return ", ".join(f"{name}()" for name in RESETS)


def _mark(dtype: torch.dtype) -> float | int | bool:
    """A value that no method leaves in a whole buffer by accident."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _unfilled(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return made.fill_(_mark(tensor.dtype))


def _filled(tensor: Tensor) -> bool:
    """Whether a method has filled what ``_unfilled`` made; booleans cannot tell."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype is torch.bool:
        return not tensor.is_meta
    mark = _mark(tensor.dtype)
    untouched = tensor.isnan() if mark != mark else tensor == mark
    return not bool(untouched.all())
