"""The choice of a fabric where there is nothing to share."""

from __future__ import annotations

import pytest
import torch

from megamuon.collectives import (
    TRANSPORTS,
    Transport,
    TransportSettings,
    build_transport,
)
from megamuon.collectives.device_library import Rung
from megamuon.collectives.fabric_choice import node_size
from megamuon.collectives.operator_settings import OperatorGrid, ReadySettings
from megamuon.mesh import MeshError
from tests.support.grids import mesh_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def built(
    fabric: str = "auto", *, world: int = 2, device: torch.device = CPU, name: str = "ready"
) -> Transport:
    """The transport of a rank whose peers are not there."""
    grid = OperatorGrid(
        mesh=mesh_of(0, world),
        device=device,
        fabric=fabric,
        settings=ReadySettings(),
        new_group=lambda: None,
    )
    settings = TransportSettings(
        gather_group=None, reduce_group=None, wire_dtype=torch.float32, grid=grid
    )
    return build_transport(name, settings)


def test_other_transports_have_no_fabric_and_nothing_to_say() -> None:
    for name in TRANSPORTS.keys() - {"ready"}:
        transport = built(name=name)
        assert transport.fabric is None
        assert transport.notes == []


def test_one_rank_says_that_nothing_moves() -> None:
    for fabric in ("auto", "host"):
        transport = built(fabric, world=1)
        assert transport.fabric is None
        (line,) = transport.notes
        assert "one data-parallel rank" in line


def test_a_fabric_by_name_is_had_or_refused() -> None:
    with pytest.raises(MeshError, match="--fabric nccl: rank 0: the nccl fabric needs GPUs"):
        built("nccl")
    with pytest.raises(MeshError, match="--fabric host: the host fabric moves CPU memory"):
        built("host", device=GPU)


def test_operators_need_a_grid() -> None:
    settings = TransportSettings(gather_group=None, reduce_group=None, wire_dtype=torch.float32)
    with pytest.raises(ValueError, match="the ready transport works on a whole grid"):
        build_transport("ready", settings)


@pytest.mark.parametrize(
    ("rung", "said"),
    [
        (
            Rung(name="lsa", reason="no switch"),
            "have not been verified on a GPU, so a run has to ask for them with --fabric nccl (the"
            " ranks agree on the rung 'lsa': no switch)",
        ),
        (
            Rung(name="symmetric", reason="no library"),
            "cannot be had here (the ranks agree on the rung 'symmetric': no library, and no"
            " transport uses torch's symmetric memory)",
        ),
        (
            Rung(name="grouped", reason="no GPU"),
            "cannot be had here (the ranks agree on the rung 'grouped': no GPU)",
        ),
    ],
)
def test_gpus_are_told_what_they_offer(
    rung: Rung, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamuon.collectives.fabric_choice.select_rung", lambda: rung)
    transport = built(device=GPU)
    assert transport.fabric is None
    (line,) = transport.notes
    assert line.endswith(f"the device operators {said}")


def test_what_the_device_operators_lack_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    with pytest.raises(MeshError) as raised:
        built("nccl", device=GPU)
    said = str(raised.value)
    assert said.startswith("--fabric nccl: rank 0: CUDA_DEVICE_MAX_CONNECTIONS=1 puts")
    assert "CUDA_MODULE_LOADING=LAZY" in said and said.endswith("or use --collectives grouped")


@pytest.mark.parametrize(
    ("here", "shards", "tp", "expected"),
    [
        ("8", 8, 1, 8),  # a replica is a node
        ("8", 16, 1, 8),  # FSDP on two nodes
        ("8", 4, 2, 4),
        ("8", 8, 2, 4),
        ("8", 12, 1, 6),  # the largest part of the replica that fits
        ("1", 4, 1, 1),
        ("4", 3, 8, 1),  # tensor parallelism is wider than a node
        (None, 4, 2, 4),  # no launcher
    ],
)
def test_the_ranks_of_a_node_are_the_launcher_s(
    here: str | None, shards: int, tp: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert node_size(mesh_of(0, shards * tp, tp=tp)) == expected
