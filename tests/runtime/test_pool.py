"""The symmetric pool: plans by property, and training inside it, bit for bit as on the heap.

Memory is a stand-in here, one tensor that is poisoned wherever nothing lives; transfers take place
as late as they may, in place, as the ``ready`` operators do them.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megamuon.models import GPT
from megamuon.models.config import RecomputeConfig
from megamuon.models.gpt import DecoderLayer
from megamuon.runtime import Runtime, shard
from megamuon.runtime.buffers import ALIGNMENT
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.pool import (
    KINDS,
    Event,
    Key,
    Lease,
    PoolConflictError,
    PoolPlan,
    decode,
    encode,
    plan_pool,
)
from megamuon.runtime.pool_opening import exclusions
from megamuon.runtime.reductions import Reductions
from tests.support.models import filled, small_config, tokens
from tests.support.pool import Opening, PlainMemory, make_late
from tests.support.runtime_config import plain_config
from tests.support.scenarios import Block, Stack

BF16 = torch.bfloat16


# --- plans ---------------------------------------------------------------------------------------


def random_cycle(seed: int) -> tuple[list[Lease], list[Event], list[Key]]:
    """Leases, and a cycle in which each comes and goes any number of times."""
    source = random.Random(seed)
    leases = [
        Lease(kind=kind, group=group, nbytes=source.choice((0, 1, 255, 256, 257, 4000, 9999)))
        for group in range(source.randint(1, 7))
        for kind in KINDS
        if source.random() < 0.8
    ]
    keys = [lease.key for lease in leases]
    start = [key for key in keys if source.random() < 0.2]
    now, events = set(start), []
    for _ in range(source.randint(0, 60) if keys else 0):
        kind, group = key = source.choice(keys)
        if key in now or len(now) < 4:
            events.append(Event(kind=kind, group=group, acquire=key not in now))
            now ^= {key}
    return leases, events, start


def made(seed: int, order: int = 0) -> PoolPlan:
    leases, events, live = random_cycle(seed)
    random.Random(order).shuffle(leases)
    return plan_pool(leases, events, live, sharded={0: 300, 1: 0}, excluded={})


def test_leases_that_live_together_never_overlap() -> None:
    """Replayed for three cycles; a lease that never lived shares with nobody at all."""
    shared = 0
    for seed in range(300):
        leases, events, live = random_cycle(seed)
        plan = made(seed)
        assert all(at % ALIGNMENT == 0 for at in (*plan.offsets.values(), plan.sharded[0]))
        assert all(plan.sizes[lease.key] >= lease.nbytes for lease in leases if lease.nbytes)
        now = set(live) & set(plan.offsets)
        seen = set(now)
        for _ in range(3):
            assert not any(other in now for key in now for other in plan.overlaps[key])
            for event in events:
                key = (event.kind, event.group)
                if key not in plan.offsets:
                    continue
                (now.add if event.acquire else now.discard)(key)
                seen.add(key)
                assert not event.acquire or not now & set(plan.overlaps[key])
        assert all(not plan.overlaps[key] for key in set(plan.offsets) - seen)
        shared += any(plan.overlaps.values())
    assert shared > 100  # else the property says nothing


def test_a_plan_depends_on_nothing_but_its_inputs() -> None:
    digests = set()
    for seed in range(60):
        first, second = made(seed), made(seed, order=1)
        assert first == second and first.digest == second.digest
        digests.add(first.digest)
    assert len(digests) > 50


def test_bytes_by_kind_add_up() -> None:
    for seed in range(100):
        plan = made(seed)
        assert sum(plan.nbytes.values()) == plan.total
        ends = [plan.offsets[key] + size for key, size in plan.sizes.items()]
        assert plan.total == max(ends, default=0) + plan.nbytes["windows"]
        assert (plan.nbytes["windows"] == 0) == (0 not in plan.sharded)


def chain(layers: int) -> list[Event]:
    """ZeRO-3: forward and backward with a prefetch of one, two reductions in flight."""
    events = []

    def add(kind: str, group: int, acquire: bool) -> None:
        if 0 <= group < layers:
            events.append(Event(kind=kind, group=group, acquire=acquire))

    add("weights", 0, True)
    for layer in range(layers):
        add("weights", layer + 1, True)
        add("weights", layer, False)
    add("weights", layers - 1, True)
    for layer in reversed(range(layers)):
        add("weights", layer - 1, True)
        add("gradients", layer, True)
        add("gradients", layer + 2, False)
        add("weights", layer, False)
    add("gradients", 1, False)
    add("gradients", 0, False)
    return events


@pytest.mark.parametrize("layers", [4, 5, 12, 31])
def test_a_chain_of_layers_needs_the_memory_of_a_few(layers: int) -> None:
    weights = [Lease(kind="weights", group=group, nbytes=4096) for group in range(layers)]
    slots = [Lease(kind="gradients", group=group, nbytes=4096) for group in range(layers)]
    only = [event for event in chain(layers) if event.kind == "weights"]
    assert plan_pool(weights, only, [], sharded={}, excluded={}).total == 2 * 4096
    both = plan_pool([*weights, *slots], chain(layers), [], sharded={}, excluded={})
    assert both.total == 5 * 4096  # two layers of weights, three of gradients
    assert both.nbytes["weights"] == 2 * 4096 and both.nbytes["gradients"] == 3 * 4096


def test_what_is_live_at_the_end_is_live_at_the_start() -> None:
    leases = [Lease(kind="gradients", group=0, nbytes=1), Lease(kind="weights", group=1, nbytes=1)]
    events = [
        Event(kind="weights", group=1, acquire=True),
        Event(kind="weights", group=1, acquire=False),
        Event(kind="gradients", group=0, acquire=True),
    ]
    plan = plan_pool(leases, events, [], sharded={}, excluded={})
    assert plan.overlaps[("weights", 1)] == ()


def test_what_is_live_at_the_start_meets_what_is_live_at_the_end() -> None:
    """The first comes alive again outside the record, while the second one lives."""
    leases = [Lease(kind="gradients", group=group, nbytes=1) for group in (0, 1)]
    events = [
        Event(kind="gradients", group=0, acquire=False),
        Event(kind="gradients", group=1, acquire=True),
    ]
    plan = plan_pool(leases, events, [("gradients", 0)], sharded={}, excluded={})
    assert plan.overlaps[("gradients", 0)] == ()


def test_excluded_groups_get_no_place() -> None:
    leases = [Lease(kind="weights", group=group, nbytes=10) for group in (0, 1)]
    plan = plan_pool(leases, [], [], sharded={0: 8, 1: 8}, excluded={1: "a reason"})
    assert set(plan.offsets) == {("weights", 0)} and set(plan.sharded) == {0}
    assert plan.excluded == {1: "a reason"}
    with pytest.raises(ValueError, match="given once"):
        plan_pool([leases[0], leases[0]], [], [], sharded={}, excluded={})


def test_a_record_survives_as_integers() -> None:
    for seed in range(50):
        _, events, live = random_cycle(seed)
        assert decode(encode(live, events)) == (tuple(live), tuple(events))


# --- training ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A short training run of a tiny model on one rank."""

    zero_stage: int = 3
    settings: dict = dataclasses.field(default_factory=dict)
    micro_batches: int = 1
    grown: int = 0  # micro-batches from the third step on, where that is another number
    once: bool = False  # --gradient-reduction step
    recompute: bool = False
    freeze: tuple[str, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()  # of Stack's blocks, step by step
    steps: int = 5
    skip: tuple[int, ...] = ()  # steps whose gradients are infinite
    evaluate: bool = True

    def model(self) -> torch.nn.Module:
        torch.manual_seed(3)
        recompute = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
        changes = {"recompute": recompute} if self.recompute else {}
        model = Stack() if self.orders else filled(small_config(num_layers=4, **changes))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.freeze))
        return model

    def loss(self, model: torch.nn.Module, number: int) -> Tensor:
        if self.orders:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            order = self.orders[number // self.micro_batches % len(self.orders)]
            return model(x.to(model.head.weight.dtype), order=order).square().sum()
        data = tokens(2, 9).roll(number, 1)
        return model(data[:, :-1], labels=data[:, 1:]).mean()


def trained(run: Run, *, pooled: bool) -> tuple[Runtime, list[Tensor], Opening | None]:
    """All losses of the run; the pool opens by itself where it is to."""
    config = plain_config(unit_threshold=50, zero_stage=run.zero_stage, **run.settings)
    runtime = shard(run.model(), layers=(DecoderLayer, Block), config=config)
    opening = Opening(runtime) if pooled else None
    late = False
    losses: list[Tensor] = []
    for step in range(run.steps):
        count = run.grown if run.grown and step > 1 else run.micro_batches
        for index in range(count):
            waits = run.once and index < count - 1
            with runtime.accumulate() if waits else nullcontext():
                loss = run.loss(runtime.model, step * run.micro_batches + index)
                (loss * (float("inf") if step in run.skip else 1)).backward()
            losses.append(loss.detach())
        runtime.step(0.02, 0.1)
        if runtime.opened is not None and not late:
            late = True
            make_late(runtime.engine)
        if run.evaluate:
            with torch.no_grad():
                losses.append(run.loss(runtime.model, 77))
    return runtime, losses, opening


NARROW = {"gather_dtype": BF16}
HALF = {"compute_dtype": BF16}
RUNS = {
    "ZeRO-3": Run(),
    "ZeRO-2": Run(zero_stage=2),
    "ZeRO-1": Run(zero_stage=1),
    "no evaluation": Run(evaluate=False),
    "micro-batches": Run(micro_batches=3),
    "micro-batches, one reduction": Run(micro_batches=3, once=True),
    "micro-batches, one reduction, BF16": Run(micro_batches=3, once=True, settings=HALF),
    "two micro-batches, one reduction": Run(micro_batches=2, once=True),
    "two micro-batches, one reduction, BF16, ZeRO-1": Run(
        micro_batches=2, once=True, settings=HALF, zero_stage=1
    ),
    "more micro-batches than recorded": Run(grown=3),
    "more micro-batches than recorded, one reduction": Run(grown=3, once=True),
    "more micro-batches than recorded, one reduction, BF16": Run(grown=3, once=True, settings=HALF),
    "skipped step": Run(zero_stage=1, skip=(1, 3), evaluate=False),
    "recompute": Run(recompute=True),
    "recompute, ZeRO-2": Run(recompute=True, zero_stage=2),
    "frozen layer": Run(freeze=("layers.1.",)),
    "frozen table and matrices": Run(freeze=("embed_tokens", "layers.0.", "q_proj")),
    "narrow gathers": Run(settings=NARROW),
    "narrow gathers, ZeRO-2": Run(settings=NARROW, zero_stage=2),
    "narrow gathers, ZeRO-1": Run(settings=NARROW, zero_stage=1),
    "layers skipped": Run(
        steps=9, orders=((0, 1, 2), (0, 1, 2), (0, 2), (2,), (1,), (0, 1, 2), (0, 1))
    ),
    "layers skipped, ZeRO-2": Run(
        zero_stage=2, steps=9, orders=((0, 1, 2), (0, 1, 2), (0, 2), (2,), (1,), (0, 1, 2))
    ),
    "layers out of order": Run(steps=6, orders=((0, 1, 2), (0, 1, 2), (2, 0, 1), (1, 2, 0))),
    "layers out of order, narrow gathers": Run(
        steps=6, settings=NARROW, orders=((0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 2))
    ),
    "layers skipped, one reduction, BF16": Run(
        steps=6,
        settings=HALF,
        micro_batches=3,
        once=True,
        orders=((0, 1, 2), (0, 1, 2), (0, 1), (0, 2)),
    ),
    "layer skipped from the start": Run(steps=6, orders=((0, 2),)),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_in_the_pool_gives_the_same_bits(name: str) -> None:
    run = RUNS[name]
    plain, wanted, _ = trained(run, pooled=False)
    runtime, losses, opening = trained(run, pooled=True)
    assert runtime.opened is not None and opening is not None
    assert opening.steps == (1 if run.micro_batches > 2 else 2)
    assert runtime.pool is None and runtime.engine.micro_batch_done is None
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
    assert torch.stack(losses).isfinite().all()
    weights = dict(runtime.full_parameters())
    assert all(torch.equal(weights[n], whole) for n, whole in plain.full_parameters())
    assert runtime.copied_share() == plain.copied_share()
    memory = runtime.opened.memory
    outside = {group.name for group in runtime.groups if not group.gradients.bound}
    assert outside <= {
        *runtime.left_out_of_pool(),
        *(group.name for group in runtime.groups if not group.trainable),
    }
    kinds = set()
    for group in runtime.groups:
        for kind, buffer in group.leased.items():
            assert (memory.offset_of(buffer.raw) is not None) == buffer.bound
            kinds |= {kind} if buffer.bound else set()
    accumulates = run.once and run.settings == HALF and not run.grown
    assert kinds == {
        "sent" if run.settings == NARROW else "weights",
        "gradients",
        *(("accumulated",) if accumulates else ()),
    }


def test_gradients_are_still_born_in_their_slots() -> None:
    runtime, _, _ = trained(Run(steps=3), pooled=True)
    before = runtime.engine.copied_bytes, runtime.engine.born_bytes
    RUNS["ZeRO-3"].loss(runtime.model, 1).backward()
    copied = runtime.engine.copied_bytes - before[0]
    born = runtime.engine.born_bytes - before[1]
    assert 0 < copied < 0.2 * born  # gains and the token table alone
    for group in runtime.groups:
        for slot in group.unsharded.values():
            assert runtime.opened.memory.offset_of(slot.gradient) is not None


def test_the_record_rules_out_no_regular_pass() -> None:
    """Copies out of the way are for passes that nobody has recorded."""
    regular = [name for name, run in RUNS.items() if not (run.orders or run.grown)]
    assert len(regular) > 12
    for name in regular:
        runtime, _, _ = trained(RUNS[name], pooled=True)
        assert runtime.opened.bytes_set_aside == 0, name
    runtime, _, _ = trained(RUNS["layers out of order"], pooled=True)
    assert runtime.opened.bytes_set_aside > 0


def test_slots_are_planned_until_their_reduction_is_over() -> None:
    """Three groups' slots at a time: two are being reduced, one is written."""
    runtime, _, _ = trained(Run(steps=2), pooled=True)
    plan, order = runtime.opened.plan, runtime.engine.reduce_order.order
    assert len(order) > 2
    for first, second, third in zip(order, order[1:], order[2:], strict=False):
        overlaps = plan.overlaps["gradients", first]
        assert ("gradients", second) not in overlaps and ("gradients", third) not in overlaps


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_pass_that_raises_leaves_nothing_in_the_way(zero_stage: int) -> None:
    """A forward that stops in its middle, and a backward that does, before training goes on."""
    run = Run(steps=3, zero_stage=zero_stage, orders=((0, 1, 2),))
    finals = []
    for pooled in (False, True):
        runtime, _, _ = trained(run, pooled=pooled)
        block = runtime.model.blocks[2]  # whose range the first one shares

        def fail(*_: object) -> None:
            raise KeyError("stop")

        handle = block.norm.register_forward_hook(fail)
        with pytest.raises(KeyError):
            run.loss(runtime.model, 5)
        handle.remove()
        handle = block.up.register_full_backward_pre_hook(fail)
        with pytest.raises(KeyError):
            run.loss(runtime.model, 6).backward()
        handle.remove()
        runtime.clear_gradients()
        for number in (7, 8):
            run.loss(runtime.model, number).backward()
            runtime.step(0.02)
        finals.append([whole.clone() for _, whole in runtime.full_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_a_deep_model_shares_the_memory_of_a_few_layers() -> None:
    totals = {}
    for layers in (6, 12):
        model = filled(small_config(num_layers=layers))
        runtime = shard(model, layers=GPT.layer_classes, config=plain_config(unit_threshold=50))
        Opening(runtime)
        for step in range(2):
            Run().loss(runtime.model, step).backward()
            runtime.step(0.01)
        plan = runtime.opened.plan
        totals[layers] = plan.total - plan.nbytes["windows"]
    assert totals[6] == totals[12]


def test_memory_is_counted_once() -> None:
    runtime, _, _ = trained(Run(steps=2), pooled=False)
    before = runtime.memory()
    assert not any(kind.startswith("pool_") for kind in before)
    runtime, _, _ = trained(Run(steps=2), pooled=True)
    held = runtime.memory()
    plan = runtime.opened.plan
    assert held["sharded_gradients"] == held["gathered_weights"] == held["unsharded_gradients"] == 0
    assert sum(v for k, v in held.items() if k.startswith("pool_")) == plan.total
    assert held["pool_windows"] >= before["sharded_gradients"] > 0
    assert held["masters"] == before["masters"]
    assert held["pool_weights"] > 0 and held["pool_sent"] == held["pool_accumulated"] == 0


def test_a_group_without_a_gradient_stays_on_the_heap() -> None:
    run = RUNS["layer skipped from the start"]
    runtime, _, _ = trained(run, pooled=True)
    assert runtime.left_out_of_pool() == {
        "blocks.1": "blocks.1.norm.weight received no gradient in the recorded micro-batch"
    }
    (group,) = (g for g in runtime.groups if g.name == "blocks.1")
    assert not (group.weights.bound or group.gradients.bound or group.sharded_pooled)


def test_windows_that_mix_all_replicas_and_owners_stay_out() -> None:
    runtime, _, _ = trained(Run(steps=1, orders=((0, 1, 2),)), pooled=False)
    group = runtime.groups[1]
    table = group.reduce_table
    mixed = dataclasses.replace(
        table,
        replicas=tuple(
            tuple(
                dataclasses.replace(p, replica=None if i == 0 else 0) for i, p in enumerate(pieces)
            )
            for pieces in table.replicas
        ),
    )
    group.reduce_table = mixed
    missing = [-1] * len(runtime.groups)
    assert exclusions(runtime.groups, missing, replicas=1) == {}
    (reason,) = exclusions(runtime.groups, missing, replicas=2).values()
    assert "every replica keeps" in reason


def test_a_collective_displaces_weights_in_use_and_brings_them_back() -> None:
    runtime, _, _ = trained(Run(steps=3, orders=((0, 1, 2),)), pooled=True)
    pool, engine = runtime.opened, runtime.engine
    weights = [("weights", group.index) for group in runtime.groups if group.name]
    first, second = next((a, b) for a in weights for b in pool.plan.overlaps[a] if b in weights)
    used, other = runtime.groups[first[1]], runtime.groups[second[1]]
    engine.root_enter()
    engine.need(used)
    before = used.weights.raw.clone()
    engine.gather(other)
    assert torch.equal(used.weights.raw.view(torch.uint8), before.view(torch.uint8))
    assert first in pool.live
    assert not other.weights.alive and second not in pool.live  # set aside until it is used
    engine.leave(used, returns=True)
    engine.need(other)
    found = {p.name: other.weights.raw_view(p.name, p.shape).clone() for p in other.parameters}
    wanted = dict(runtime.full_parameters())
    assert found and all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_gradients_written_over_weights_in_use_raise_and_name_the_remedy() -> None:
    runtime, _, _ = trained(Run(steps=3, orders=((0, 1, 2),)), pooled=True)
    pool, engine = runtime.opened, runtime.engine
    keys = [(kind, g.index) for g in runtime.groups if g.name for kind in ("gradients", "weights")]
    slots, first = next(
        (a, b)
        for a in keys
        for b in pool.plan.overlaps[a]
        if a[0] == "gradients" and b in keys and b[0] == "weights" and a[1] != b[1]
    )
    engine.root_enter()
    engine.need(runtime.groups[first[1]])
    names = [f"'{runtime.groups[key[1]].name}'" for key in (slots, first)]
    with pytest.raises(PoolConflictError, match=r".*".join(names)) as raised:
        engine.reductions.before_write(runtime.groups[slots[1]])
    assert "--collectives grouped" in str(raised.value)


def test_a_reduction_in_flight_is_waited_for() -> None:
    """Its slots lie where a gather must go, and are read at the latest moment."""
    run = Run(steps=3, orders=((0, 1, 2),))
    plain, _, _ = trained(run, pooled=False)
    run.loss(plain.model, 9).backward()
    plain.finish_reductions()
    moved = set()
    for number in range(len(plain.groups)):
        runtime, _, _ = trained(run, pooled=True)
        pool, group = runtime.opened, runtime.groups[number]
        run.loss(runtime.model, 9).backward()
        over = {key for key in pool.plan.overlaps["weights", number] if key in pool.live}
        assert all(key[0] == "gradients" and runtime.groups[key[1]].reducing for key in over)
        runtime.engine.gather(group)
        group.wait_gathered()
        assert not over & pool.live
        moved |= over
        runtime.finish_reductions()
        for got, wanted in zip(runtime.groups, plain.groups, strict=True):
            assert torch.equal(got.sharded_gradient, wanted.sharded_gradient)
    assert moved and runtime.opened.bytes_set_aside == 0


def test_a_prefetch_without_room_is_left_for_later() -> None:
    runtime, _, _ = trained(Run(steps=3, orders=((0, 1, 2),)), pooled=True)
    pool, engine, groups = runtime.opened, runtime.engine, runtime.groups
    order = engine.forward_order.order
    engine.root_enter()
    engine.need(groups[order[0]])
    # Whoever sits where the group after the next one goes keeps it from being prefetched.
    following = order[2]
    pool.live.add(blocker := pool.plan.overlaps["weights", following][0])
    assert not pool.free(groups[following])
    engine.need(groups[order[1]])
    assert groups[following].version == -1 and engine.forward_order.next == 2
    pool.live.discard(blocker)
    engine.need(groups[following])
    assert groups[following].version == engine.version and engine.forward_order.next >= 3


def test_writes_into_the_pool_are_invisible_to_autograd() -> None:
    runtime, _, _ = trained(Run(steps=2, orders=((0, 1, 2),)), pooled=True)
    head = runtime.model.head.weight
    group = next(g for g in runtime.groups if g.name == "")
    version = head._version
    runtime.engine.gather(group)
    group.enter()
    group.weights.raw.fill_(2.0)
    assert head._version == version and bool((head == 2).all())
    assert runtime.opened.memory.offset_of(head) is not None


def test_the_pool_opens_only_where_it_fits_and_between_steps() -> None:
    runtime, _, _ = trained(Run(steps=1), pooled=False)
    opening = Opening(runtime)
    with pytest.raises(RuntimeError, match="train on"):
        opening.recording.plan()
    for step in (0, 1):
        Run().loss(runtime.model, step).backward()
    opening.recording.step_done()
    plan = opening.recording.plan()
    with pytest.raises(ValueError, match=f"a pool of {plan.total} bytes"):
        runtime.open_pool(plan, PlainMemory(plan.total - 1))
    with runtime.accumulate():
        Run().loss(runtime.model, 0).backward()
    with pytest.raises(RuntimeError, match="between two steps"):
        runtime.open_pool(plan, PlainMemory(plan.total))


def test_slots_and_sums_that_were_set_aside_are_added_up_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever waits for its reduction may be moved at any time."""
    run = RUNS["micro-batches, one reduction, BF16"]
    plain, wanted, _ = trained(run, pooled=False)
    fold, moved = Reductions._fold, []

    def moving(reductions: Reductions, group: LayerGroup) -> None:
        for buffer in (group.gradients, group.sums):
            if buffer.bound and buffer.alive:
                buffer.set_aside()
                moved.append(group.index)
        fold(reductions, group)

    monkeypatch.setattr(Reductions, "_fold", moving)
    runtime, losses, _ = trained(run, pooled=True)
    assert len(set(moved)) == len(runtime.groups)
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
    weights = dict(runtime.full_parameters())
    assert all(torch.equal(weights[n], whole) for n, whole in plain.full_parameters())
