"""A rank's resident copies of its rail's parameters, from which its replica gathers.

Owns the layout of a copy, which is also that of a message (header and payload, one behind the
other), and the checks that every publisher makes of its tables.  Invariant: a header tells which
parameter the payload is and which version.  Who fills the copies: ``publish.py`` with the library's
transfers, ``ready_publish.py`` with the persistent operator.  Tested by
``tests/collectives/test_publish_copies.py`` and through both publishers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import CollectiveError

HEADER_BYTES = 16  # int64 version, int64 parameter index
ALIGNMENT = 16


class StaleCopyError(CollectiveError):
    """A leader copy holds another version than the one that the forward pass needs."""

    def __init__(
        self, what: str, *, replica: int, held: str, wanted: int, owner_replica: int
    ) -> None:
        """``what``: the parameter; ``held``: what the copy of ``replica`` holds instead of version
        ``wanted``.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(
            f"{what}: the leader copy of rank {rank}, replica {replica}, holds {held}, wanted"
            f" version {wanted} from owner replica {owner_replica}"
        )


class CopySize(NamedTuple):
    """What a copy holds."""

    numel: int
    dtype: torch.dtype  # as gathers and publishes carry it

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.numel * self.dtype.itemsize


class LeaderCopies:
    """The resident copies of one rail's parameters, header and payload each, in one buffer."""

    def __init__(
        self,
        sizes: Mapping[int, CopySize],
        device: torch.device | str,
        *,
        buffer: Tensor | None = None,
    ) -> None:
        """``sizes``: by parameter index. All copies start at zero, version 0.

        ``buffer``: zeros of at least ``bytes_of(sizes)`` to lie in, ``(bytes,)`` uint8.
        """
        self._places, end = _places(sizes)
        if buffer is None:
            buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.buffer = buffer[:end]
        self._headers: dict[int, Tensor] = {}
        self._payloads: dict[int, Tensor] = {}
        for index, (start, stop) in self._places.items():
            header = self.buffer[start : start + HEADER_BYTES].view(torch.int64)
            header[1] = index
            self._headers[index] = header
            payload = self.buffer[start + HEADER_BYTES : stop]
            self._payloads[index] = payload.view(sizes[index].dtype)

    @staticmethod
    def bytes_of(sizes: Mapping[int, CopySize]) -> int:
        """What the copies of ``sizes`` take, headers and alignment included."""
        return _places(sizes)[1]

    def place(self, index: int) -> tuple[int, int]:
        """Where a payload lies in the buffer: its first byte, and how many."""
        start, stop = self._places[index]
        return start + HEADER_BYTES, stop - start - HEADER_BYTES

    @property
    def indices(self) -> tuple[int, ...]:
        """The parameters held, in the order of the buffer."""
        return tuple(self._places)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the buffer: payloads, headers and alignment."""
        return self.buffer.numel()

    def payload(self, index: int) -> Tensor:
        """The copy of a parameter, ``(numel,)``, a view."""
        return self._payloads[index]

    def message(self, index: int) -> Tensor:
        """Header and payload as they travel, ``(bytes,)`` uint8, a view."""
        start, stop = self._places[index]
        return self.buffer[start:stop]

    def stamp(self, index: int, version: int) -> None:
        """Write the version of a payload that this rank wrote itself."""
        self._headers[index][0] = version

    def version(self, index: int) -> int:
        """The version in the header; on a GPU this waits for the current stream."""
        return int(self._headers[index][0])

    def headers(self, indices: Sequence[int]) -> Tensor:
        """``(len(indices), 2)`` int64 on the device: version and parameter index of each."""
        return torch.stack([self._headers[index] for index in indices])


def _places(sizes: Mapping[int, CopySize]) -> tuple[dict[int, tuple[int, int]], int]:
    """Start of the header and end of the payload of each parameter, and the end of all."""
    places: dict[int, tuple[int, int]] = {}
    end = 0
    for index, size in sizes.items():
        stop = end + HEADER_BYTES + size.nbytes
        places[index] = (end, stop)
        end = -(-stop // ALIGNMENT) * ALIGNMENT
    return places, end


def check_rail(
    copies: LeaderCopies,
    names: Mapping[int, str],
    owner_replicas: Mapping[int, int],
    group: dist.ProcessGroup | None,
    *,
    replica: int,
    replicas: int,
) -> None:
    """Refuse tables that do not fit the copies or the rail. Raises ValueError."""
    if group is not None and dist.get_rank(group) != replica:
        raise ValueError(
            f"replica {replica} is rank {dist.get_rank(group)} of its replicate group: "
            "build the group in order of replicas"
        )
    for index in copies.indices:
        if index not in names or index not in owner_replicas:
            raise ValueError(f"parameter {index} has a leader copy but no name or owner replica")
        if not 0 <= owner_replicas[index] < replicas:
            raise ValueError(
                f"{names[index]}: owner replica {owner_replicas[index]} is outside"
                f" 0..{replicas - 1}"
            )
