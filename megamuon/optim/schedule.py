"""Learning rate and weight decay over a run, counted in samples.

Owns ``ScheduleConfig`` and ``Schedule``. Invariants: the values are Megatron-LM's
``OptimizerParamScheduler`` to the last bit, for the same counts; they are pure functions of the
number of samples, so a skipped step or a resume cannot shift them; only ``num_steps`` moves. Tested
by ``tests/optim/test_schedule.py`` against closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

LrStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WdStyle = Literal["constant", "linear", "cosine"]
LoadMode = Literal["match", "override", "use_checkpoint"]

# Key in the checkpoint -> our field, for every field. The first nine keys are Megatron's, the
# others our flags'. ``num_steps`` is the one key that is position, not configuration.
_KEYS: tuple[tuple[str, str], ...] = (
    ("max_lr", "max_lr"),
    ("lr_warmup_steps", "warmup_steps"),
    ("lr_decay_style", "style"),
    ("lr_decay_steps", "decay_steps"),
    ("min_lr", "min_lr"),
    ("start_wd", "start_wd"),
    ("end_wd", "end_wd"),
    ("wd_incr_style", "wd_style"),
    ("wd_incr_steps", "wd_steps"),
    ("lr_warmup_init", "init_lr"),
    ("lr_wsd_decay_style", "wsd_style"),
    ("lr_wsd_decay_steps", "wsd_steps"),
    ("decoupled_lr", "decoupled_lr"),
    ("decoupled_min_lr", "decoupled_min_lr"),
)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """All ``*_steps`` count samples. ``warmup_steps`` is part of ``decay_steps``; ``wsd_steps``
    is the length of the final decay of ``WSD`` and ``wsd_style`` its shape; the weight decay
    goes from ``start_wd`` to ``end_wd`` over ``wd_steps``. ``decoupled_lr`` and
    ``decoupled_min_lr`` are the peak and the floor of the parameters that have rates of their own;
    None: they have not, or the floor of the others.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int
    style: LrStyle = "linear"
    wsd_style: WsdStyle = "exponential"
    wsd_steps: int | None = None
    start_wd: float = 0.01
    end_wd: float = 0.01
    wd_style: WdStyle = "constant"
    wd_steps: int = 0
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("learning-rate schedule: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        found: list[str] = []

        def require(holds: bool, text: str) -> None:
            if not holds:
                found.append(text)

        for name, value, allowed in (
            ("style", self.style, get_args(LrStyle)),
            ("wsd_style", self.wsd_style, get_args(WsdStyle)),
            ("wd_style", self.wd_style, get_args(WdStyle)),
        ):
            require(value in allowed, f"{name} = {value!r}, choose one of {', '.join(allowed)}")
        require(
            0.0 <= self.min_lr <= self.max_lr,
            f"min_lr = {self.min_lr} must lie between 0 and max_lr = {self.max_lr}",
        )
        require(
            0.0 <= self.init_lr <= self.max_lr,
            f"init_lr = {self.init_lr} must lie between 0 and max_lr = {self.max_lr}",
        )
        require(self.decay_steps > 0, f"decay_steps = {self.decay_steps} must be positive")
        require(
            0 <= self.warmup_steps < self.decay_steps,
            f"warmup_steps = {self.warmup_steps} must be less than decay_steps = "
            f"{self.decay_steps}",
        )
        if self.style == "WSD":
            require(
                self.wsd_steps is not None and 0 < self.wsd_steps <= self.decay_steps,
                f"wsd_steps = {self.wsd_steps} must lie in 1..{self.decay_steps} for the WSD style",
            )
        require(
            0.0 <= self.start_wd <= self.end_wd,
            f"start_wd = {self.start_wd} must lie between 0 and end_wd = {self.end_wd}",
        )
        if self.wd_style == "constant":
            require(
                self.start_wd == self.end_wd,
                f"start_wd = {self.start_wd} and end_wd = {self.end_wd} must be equal for a "
                "constant decay",
            )
        else:
            require(self.wd_steps > 0, f"wd_steps = {self.wd_steps} must be positive")
        return found


def _shape(style: str, ratio: float) -> float:
    """1 at ratio 0, 0 at ratio 1."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    return 1.0 - math.sqrt(ratio)  # minus_sqrt


class Schedule:
    """The schedule of one run.  ``num_steps`` is the number of samples trained on so far."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.num_steps = 0

    def advance(self, samples: int) -> None:
        """After a step that was not skipped: ``samples`` is its global batch size."""
        self.num_steps += samples

    def lr(
        self,
        num_steps: int | None = None,
        *,
        max_lr: float | None = None,
        min_lr: float | None = None,
    ) -> float:
        """The learning rate after ``num_steps`` samples (default: so far). ``max_lr`` and
        ``min_lr`` replace the configured ones for one group of parameters (Megatron's
        ``--decoupled-lr``).
        """
        c = self.config
        n = self.num_steps if num_steps is None else num_steps
        top = c.max_lr if max_lr is None else max_lr
        bottom = c.min_lr if min_lr is None else min_lr
        if c.warmup_steps > 0 and n <= c.warmup_steps:
            return c.init_lr + (top - c.init_lr) * float(n) / float(c.warmup_steps)
        if c.style == "constant":
            return top
        if n > c.decay_steps:
            return bottom
        if c.style == "inverse-square-root":
            return max(bottom, top * max(c.warmup_steps, 1) ** 0.5 / max(n, 1) ** 0.5)
        if c.style == "WSD":
            decaying = n - (c.decay_steps - (c.wsd_steps or 0))
            part = (
                _shape(c.wsd_style, float(decaying) / float(c.wsd_steps or 1))
                if decaying > 0
                else 1.0
            )
        else:
            part = _shape(
                c.style, float(n - c.warmup_steps) / float(c.decay_steps - c.warmup_steps)
            )
        return bottom + part * (top - bottom)

    def decoupled(self) -> float:
        """The present learning rate of parameters with rates of their own (``--decoupled-lr``);
        that of all others where there is none.
        """
        c = self.config
        if c.decoupled_lr is None:
            return self.lr()
        # Megatron's default: the floor of the other parameters.
        floor = c.min_lr if c.decoupled_min_lr is None else c.decoupled_min_lr
        return self.lr(max_lr=c.decoupled_lr, min_lr=floor)

    def wd(self, num_steps: int | None = None) -> float:
        """The weight decay after ``num_steps`` samples (default: so far)."""
        c = self.config
        n = self.num_steps if num_steps is None else num_steps
        if c.wd_style == "constant" or n > c.wd_steps:
            return c.end_wd
        ratio = float(n) / float(c.wd_steps)
        # cos(pi (1 - r)), not 1 minus the falling half cosine: the same last bit as Megatron.
        part = ratio if c.wd_style == "linear" else _shape("cosine", 1 - ratio)
        return c.start_wd + part * (c.end_wd - c.start_wd)

    def state_dict(self) -> dict[str, Any]:
        """Under Megatron's keys where it has them; plain numbers, strings and None."""
        state = {key: getattr(self.config, name) for key, name in _KEYS}
        return {**state, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any], *, mode: LoadMode = "match") -> None:
        """Takes up the position, and settles the configuration by ``mode``.

        ``match``: every stored value must equal the configured one, else ValueError that names all
        differences.
        ``override`` (``--override-opt_param-scheduler``): the configuration wins.
        ``use_checkpoint`` (``--use-checkpoint-opt_param-scheduler``): the stored values win.
        A key missing from the state is a ValueError too, unless the configuration wins.
        """
        if mode not in get_args(LoadMode):
            raise ValueError(
                f"schedule load mode {mode!r}: choose match, override or use_checkpoint"
            )
        needed = [key for key, _ in _KEYS] if mode != "override" else []
        missing = [key for key in (*needed, "num_steps") if key not in state]
        if missing:
            raise ValueError(
                f"the schedule in the checkpoint lacks {', '.join(missing)}: set"
                " --override-opt_param-scheduler to take the command line's"
            )
        if mode == "match":
            different = [
                f"{key} is {state[key]!r} in the checkpoint and {ours!r} in the configuration"
                for key, ours in ((key, getattr(self.config, name)) for key, name in _KEYS)
                if state[key] != ours
            ]
            if different:
                raise ValueError(
                    "schedule differs from the checkpoint: "
                    + "; ".join(different)
                    + ". Set --override-opt_param-scheduler to keep the configuration, or "
                    "--use-checkpoint-opt_param-scheduler to take the checkpoint's"
                )
        if mode == "use_checkpoint":
            self.config = replace(self.config, **{name: state[key] for key, name in _KEYS})
        self.num_steps = int(state["num_steps"])
