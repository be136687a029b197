"""What a rank does when: spans of one step, from hooks around a line's own calls.

Owns ``Spans`` and the ways to attach it, to the owner runtime, its publishers and FSDP2. Invariant:
hooks only look at the clock; calls, their order and their results are as without them. Tested by
``tests/tools/test_trace.py``.

A span of a collective runs from its launch to the end of the wait for it; what is still in flight
at an end of the step is cut there and marked ``cut``. Line D's operators have no handle per
parameter of a publish: a send ends with the wait for the whole round, a receive with the wait of
the layer that needs it. In the compute lane a layer's forward span
holds its waits; a layer's backward span runs to the start of the next one, because autograd has no
sign of its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from megamuon.collectives.ready_publish import ReadyPublisher
from megamuon.runtime import Runtime
from megamuon.runtime.layer_group import LayerGroup
from tools.bench.systems import Line

LANES = ("compute", "gather", "reduce", "publish")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something from ``start`` to ``stop``, seconds of this rank's clock."""

    lane: str
    name: str
    start: float
    stop: float
    cut: bool = False


class Spans:
    """Collects spans; a phase is a span in the compute lane that others lie in."""

    def __init__(self) -> None:
        self.found: list[Span] = []
        self.phase = ""
        self._phase_start = 0.0
        self._layers: list[tuple[str, float]] = []  # forward: modules that are computing
        self._backward: tuple[str, float] | None = None
        self._flying: dict[tuple[str, object], tuple[str, float]] = {}

    def mark(self, phase: str) -> None:
        """A phase begins (and the one before ends); "end" ends the step."""
        now = time.perf_counter()
        self._end_backward(now)
        if self.phase:
            self.add("compute", self.phase, self._phase_start, now)
        self._layers.clear()
        self.phase, self._phase_start = ("" if phase == "end" else phase), now

    def add(self, lane: str, name: str, start: float, stop: float | None = None) -> None:
        """A span that ends now, or at ``stop``."""
        stop = time.perf_counter() if stop is None else stop
        self.found.append(Span(lane=lane, name=name, start=start, stop=stop))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, start)

    # --- compute ---------------------------------------------------------------------------------

    def enter_layer(self, name: str) -> None:
        """A module's forward begins; recomputations count to the backward pass."""
        if self.phase == "forward":
            self._layers.append((name, time.perf_counter()))

    def leave_layer(self, name: str) -> None:
        """It has computed."""
        if self._layers and self._layers[-1][0] == name:
            self.add("compute", f"forward {name}", self._layers.pop()[1])

    def backward_reaches(self, name: str) -> None:
        """A gradient has reached an output of ``name``."""
        if self.phase == "backward" and (self._backward is None or self._backward[0] != name):
            now = time.perf_counter()
            self._end_backward(now)
            self._backward = (name, now)

    def _end_backward(self, now: float) -> None:
        if self._backward is not None:
            name, start = self._backward
            self.add("compute", f"backward {name}", start, now)
            self._backward = None

    # --- collectives -----------------------------------------------------------------------------

    def launch(self, lane: str, key: object, name: str, start: float | None = None) -> None:
        """A collective starts."""
        self._flying[lane, key] = (name, time.perf_counter() if start is None else start)

    @contextmanager
    def waiting(self, lane: str, key: object) -> Iterator[None]:
        """The block waits for the collective of that key; its span ends with the block."""
        start = time.perf_counter()
        yield
        stop = time.perf_counter()
        if (flying := self._flying.pop((lane, key), None)) is not None:
            self.add(lane, flying[0], flying[1], stop)
            self.add("compute", f"wait for {flying[0]}", start, stop)

    def land(self, lane: str, key: object) -> None:
        """The collective of that key, if it is in flight, has ended, in a wait that somebody else
        watches.
        """
        if (flying := self._flying.pop((lane, key), None)) is not None:
            self.add(lane, *flying)

    def step(self, start: float, stop: float) -> list[Span]:
        """What overlaps the time from ``start`` to ``stop``, cut to it; what still flies
        included.
        """
        flying = [
            Span(lane=lane, name=name, start=begun, stop=float("inf"))
            for (lane, _), (name, begun) in self._flying.items()
        ]
        return [
            replace(
                span,
                start=max(span.start, start),
                stop=min(span.stop, stop),
                cut=span.start < start or span.stop > stop,
            )
            for span in [*self.found, *flying]
            if span.start < stop and span.stop > start
        ]


def around(
    thing: Any, name: str, context: Callable[..., Any], *, after: Callable[..., None] | None = None
) -> None:
    """Run ``thing.name`` inside ``context(*its arguments)``, then call ``after`` with them."""
    original = getattr(thing, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            result = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(thing, name, method)


def before(thing: Any, name: str, action: Callable[..., None]) -> None:
    """Call ``action`` with the arguments of ``thing.name`` before it."""
    original = getattr(thing, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(thing, name, method)


def attach(line: Line, spans: Spans) -> None:
    """Watch a line."""
    if isinstance(line.runtime, Runtime):
        _attach_engine(line.runtime, spans)
        _attach_optimizers(line.runtime, spans)
        if line.publication is not None:
            _attach_publisher(line, spans)
    else:
        _attach_fsdp2(line, spans)


def label(group: LayerGroup) -> str:
    """What people call a layer group."""
    return group.name or "loose parameters"


def _attach_engine(runtime: Runtime, spans: Spans) -> None:
    engine = runtime.engine
    before(engine, "need", lambda group: spans.enter_layer(label(group)))
    before(engine, "leave", lambda group, **_: spans.leave_layer(label(group)))
    before(engine, "enter_backward", lambda group, *_, **__: spans.backward_reaches(label(group)))
    launches: dict[int, float] = {}

    def reduced(group: LayerGroup) -> None:
        if group.reducing is not None:
            start = launches[group.index]
            spans.launch("reduce", group.index, f"reduce {label(group)}", start)

    if engine.publication is not None:  # a gather is launched when its copies are there
        around(
            engine.publication,
            "wait",
            lambda group: spans.span("compute", f"wait for publish of {label(group)}"),
            after=lambda group: launches.update({group.index: time.perf_counter()}),
        )
    original = engine.gather

    def gather(group: LayerGroup) -> None:
        launches[group.index] = time.perf_counter()
        with spans.span("compute", f"start gather {label(group)}"):
            original(group)
        name = f"gather {label(group)}"
        spans.launch("gather", group.index, name, launches[group.index])

    engine.gather = gather  # type: ignore[method-assign]
    _attach_reductions(runtime, spans, launches, reduced)


def _attach_reductions(
    runtime: Runtime,
    spans: Spans,
    launches: dict[int, float],
    reduced: Callable[[LayerGroup], None],
) -> None:
    engine = runtime.engine
    original = engine.reductions.start

    def start(group: LayerGroup, **options: bool) -> None:
        launches[group.index] = time.perf_counter()
        original(group, **options)
        reduced(group)

    engine.reductions.start = start  # type: ignore[method-assign]
    for group in runtime.groups:
        around(group, "wait_gathered", lambda g=group: spans.waiting("gather", g.index))
        around(group, "finish_reduction", lambda g=group: spans.waiting("reduce", g.index))


def _attach_optimizers(runtime: Runtime, spans: Spans) -> None:
    step = runtime._step
    layer_of = {p.name: label(group) for group in runtime.groups for p in group.parameters}

    def updating(items: Any, *_: Any) -> Any:
        layers = list(dict.fromkeys(layer_of[item.name] for item in items))
        what = layers[0] if len(layers) == 1 else f"{len(layers)} layer groups"
        return spans.span("compute", f"update {what}")

    around(step, "_norm", lambda: spans.span("compute", "gradient norm"))
    around(step.elementwise, "update", updating)
    if step.matrices is not None:
        around(step.matrices.optimizer, "update", updating)
        around(step.matrices.optimizer, "directions", updating)


def _attach_publisher(line: Line, spans: Spans) -> None:
    publication = line.publication
    assert publication is not None
    publisher = publication.publisher

    def key(direction: str, index: int) -> tuple[str, int]:
        return (direction, index)

    def name(direction: str, index: int) -> str:
        return f"{direction} {publisher.names[index]}"

    if isinstance(publisher, ReadyPublisher):
        _attach_ready_publisher(publisher, spans, key, name)
        return
    before(
        publisher,
        "publish",
        lambda index: spans.launch("publish", key("send", index), name("send", index)),
    )
    before(
        publisher,
        "_post_receive",
        lambda index: spans.launch("publish", key("receive", index), name("receive", index)),
    )
    around(
        publisher,
        "_finish_sends",
        lambda index: spans.waiting("publish", key("send", index)),
    )
    around(
        publisher,
        "_finish_receive",
        lambda index: spans.waiting("publish", key("receive", index)),
    )


def _attach_ready_publisher(
    publisher: ReadyPublisher,
    spans: Spans,
    key: Callable[[str, int], tuple[str, int]],
    name: Callable[[str, int], str],
) -> None:
    """A round is expected, sent parameter by parameter, waited for layer by layer, and drained."""

    def expected(order: Any, _: int) -> None:
        for index in order:
            if publisher.owner_replicas[index] != publisher.replica:
                spans.launch("publish", key("receive", index), name("receive", index))

    def waited(indices: Any, _: Any) -> None:
        for index in indices:
            spans.land("publish", key("receive", index))

    def drained() -> None:
        for index in publisher.names:
            spans.land("publish", key("send", index))

    around(publisher, "expect", lambda *_: nullcontext(), after=expected)
    before(
        publisher,
        "publish",
        lambda index: spans.launch("publish", key("send", index), name("send", index)),
    )
    around(publisher, "wait", lambda *_: nullcontext(), after=waited)
    around(
        publisher,
        "drain",
        lambda: spans.span("compute", "wait for the last publish"),
        after=drained,
    )


def _attach_fsdp2(line: Line, spans: Spans) -> None:
    """FSDP2's groups have no public hooks; these methods are those of torch 2.11 to 2.13. A
    reduction is launched, and on Gloo waited for, inside ``post_backward``.
    """
    runtime = line.runtime
    paths = {module: path for path, module in line.model.named_modules()}
    for module in runtime._modules:
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        name = paths[module] or "root"
        before(group, "pre_forward", lambda *_, n=name: spans.enter_layer(n))
        before(group, "post_forward", lambda *_, n=name: spans.leave_layer(n))
        before(group, "pre_backward", lambda *_, n=name: spans.backward_reaches(n))
        _attach_fsdp2_gather(group, name, spans)
        around(group, "post_backward", lambda *_, n=name: spans.span("reduce", f"reduce {n}"))
    around(runtime._step, "_reduce_norm", lambda *_: spans.span("compute", "gradient norm"))
    around(runtime._step.optimizer, "update", lambda *_: spans.span("compute", "update all shards"))


def _attach_fsdp2_gather(group: Any, name: str, spans: Spans) -> None:
    original = group.unshard

    def unshard(*args: Any, **kwargs: Any) -> None:
        held, start = group._all_gather_result, time.perf_counter()
        original(*args, **kwargs)
        if held is None and group._all_gather_result is not None:
            spans.launch("gather", id(group), f"gather {name}", start)

    group.unshard = unshard
    around(group, "wait_for_unshard", lambda *_: spans.waiting("gather", id(group)))
