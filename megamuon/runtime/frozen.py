"""Groups of which nothing trains, and whether any backward pass reads their weights.

Owns ``FrozenUses``, what the uses of one such group have shown. Invariant: a group counts as unread
only if every use of it that this rank has seen says so. Tested by
``tests/distributed/test_frozen_groups.py`` and ``tests/distributed/test_runtime_fuzz.py``.

[Note: groups that do not train]

A group without trainable members may have nothing below it that needs a gradient: a frozen tower in
front of what trains. No backward pass reads its weights then, so it has no place in the backward
orders, and even ZeRO-2 releases it at the end of the forward pass. Whether that is so shows in what
its modules return: tensors that require no gradient, and nothing that could hide one; and
activation checkpointing around it has saved nothing, or it would be run again. The ranks agree on
it at the end of the first forward pass with gradients: a group stays in the orders where any rank
saw a gradient pass, or where none used it. It is an error if a gradient comes through later:
nobody else would take part in the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
UNUSED, UNREAD, READ = 0, 1, 2  # the largest that any rank says counts


def may_pass_gradients(output: object) -> bool:
    """Whether a tensor in ``output`` requires a gradient, or may: what cannot be looked into may
    hide one.
    """
    return any(
        leaf.requires_grad if isinstance(leaf, Tensor) else not isinstance(leaf, _PLAIN)
        for leaf in tree_leaves(output)
    )


class FrozenUses:
    """What the uses of one group in forward passes with gradients have shown so far."""

    def __init__(self) -> None:
        self._shown = UNUSED
        self._checkpointed: list[ref[Callable[..., object]]] = []

    def saw(self, output: object) -> None:
        """A module of the group has returned ``output``."""
        self._shown = max(self._shown, READ if may_pass_gradients(output) else UNREAD)
        # Inside of activation checkpointing; what that saves for a recomputation holds its hook.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            self._checkpointed.append(ref(hooks[1]))

    def shown(self) -> int:
        """UNUSED, UNREAD or READ; at the end of a forward pass, while its graph is alive."""
        if any(hook() is not None for hook in self._checkpointed):
            self._shown = READ
        self._checkpointed.clear()
        return self._shown


def unexpected(name: str) -> RuntimeError:
    """The error of a gradient that passes through group ``name`` after all."""
    return RuntimeError(
        f"a gradient passes through the layer group {name or 'of loose parameters'!r}, of which"
        " nothing trains: in the first training pass none did on any rank, so its weights are not"
        " gathered for backward passes. Let a gradient pass through it in the first pass too"
        " (inputs that require one, say), or none (detach its inputs, or run it under"
        " torch.no_grad()), or use zero_stage=1"
    )
