"""What one rank holds of a group: masters, windows and tables follow the plan's segments."""

from __future__ import annotations

import torch

from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.mesh import Mesh
from megamuon.ownership import Topology, build_plan, closed_form_cost
from megamuon.ownership.groups import group_of
from megamuon.placements import Placed
from megamuon.runtime.layer_group import LayerGroup


def parameter(name: str, *shape: int, route: Route, even: bool = False) -> LogicalParameter:
    return LogicalParameter(
        name=name,
        shape=shape,
        kind=Kind.MATRIX,
        route=route,
        **placements_for(route, Placed(shape=shape), owned=not even),
        reason="test",
        layer="layers.0",
    )


PARAMETERS = (
    parameter("table", 5, 2, route=Route.ADAMW_SHARDED, even=True),
    parameter("frozen", 4, 3, route=Route.FROZEN),
    parameter("matrix", 3, 4, route=Route.MATRIX),
    parameter("scalar", route=Route.ADAMW_OWNER),
)


def groups(world: int) -> list[LayerGroup]:
    topology = Topology(replicas=1, shards=world)
    plan = build_plan(PARAMETERS, topology, closed_form_cost(), threshold=1)
    return [
        LayerGroup(
            index=0,
            key=group_of(PARAMETERS[0]),
            parameters=plan.parameters,
            plan=plan,
            mesh=Mesh(
                world_size=world,
                rank=rank,
                local_rank=rank,
                replicas=1,
                shards=world,
                device=torch.device("cpu"),
                backend="gloo",
            ),
            dtypes=(torch.bfloat16, torch.bfloat16),
            master_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for rank in range(world)
    ]


def test_ranks_hold_every_element_once() -> None:
    for world in (1, 2, 3):
        made = groups(world)
        elements = sum(p.numel for p in PARAMETERS)
        frozen = PARAMETERS[1].numel
        assert sum(g.master.numel() for g in made) == elements - frozen
        # What does not train is kept once, in the dtype that is gathered.
        assert sum(g.frozen.numel() for g in made) == frozen
        assert {g.frozen.dtype for g in made} == {torch.bfloat16}
        assert sum(g.sharded_gradient.numel() for g in made) == elements - frozen
        for rank, group in enumerate(made):
            assert group.gather_table.sizes[rank] == group.master.numel() + group.frozen.numel()
            assert group.reduce_table.shards.sizes[rank] == group.sharded_gradient.numel()
            for segment in group.local:
                assert (segment.sharded_gradient is None) == (segment.parameter.name == "frozen")
                shape = segment.parameter.shape
                assert segment.shaped(segment.master).shape == (
                    (segment.rows[1], *shape[1:]) if shape else ()
                )


def test_a_new_group_holds_no_weights_and_no_slots() -> None:
    """Else sharding would need the memory of the whole model on every rank."""
    for group in groups(2):
        assert group.weights.resident_bytes == group.gradients.resident_bytes == 0
        assert group.weights.raw.untyped_storage().nbytes() == 0


def test_masters_reach_their_place_in_the_buffer() -> None:
    for group in groups(2):
        held = group.master.numel() + group.frozen.numel()
        group.master.copy_(torch.arange(group.master.numel()) + 1.0)
        group.frozen.copy_(torch.arange(group.frozen.numel()) + 7.0)
        group.weights.revive()
        group.weights.raw.zero_()
        group.write_sources()
        for segment in group.local:
            name = segment.parameter.name
            piece = group.weights.raw_piece(name, segment.start, segment.stop)
            assert torch.equal(piece.float(), segment.master.float())
        assert int(group.weights.raw.count_nonzero()) == held
