"""Sizes of a model that its flags leave open.

Owns Megatron's rules for them, which the flags and the model's description share. Invariant: pure
numbers, and no torch, which ``--help`` would wait for. Tested by
``tests/arguments/test_derive.py`` and ``tests/models/test_presets.py``.
"""


def mlp_width(hidden: int, *, gated: bool) -> int:
    """Width of an MLP whose flags do not give one. A gated one has three matrices instead of two:
    2/3 of the width, in multiples of 64.
    """
    return 8 * hidden // 192 * 64 if gated else 4 * hidden


def head_channels(hidden: int, heads: int) -> int | None:
    """Channels of a head whose flags do not give them; None where the heads do not divide."""
    return hidden // heads if heads > 0 and hidden % heads == 0 else None
