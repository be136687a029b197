"""Sizes of leader copies for tests in which all of them have one dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megamuon.collectives.leader_copies import CopySize


def sized(numels: Mapping[int, int], dtype: torch.dtype) -> dict[int, CopySize]:
    """Parameter index -> what its copy holds."""
    return {index: CopySize(numel, dtype) for index, numel in numels.items()}
