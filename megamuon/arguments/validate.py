"""Validation of a configuration: runs all checks and reports all bad flags at once.

Owns the list of checks. Invariant: all of them always run, so the user sees every problem at once.
Tested by ``tests/arguments/test_validate.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from megamuon.arguments.checks_parallel import (
    check_experts,
    check_grid,
    check_line,
    check_ownership,
    check_stages,
    check_tensor_parallel,
)
from megamuon.arguments.checks_run import (
    check_data,
    check_exit,
    check_loading,
    check_logging,
    check_profiling,
    check_recompute,
    check_saving,
    check_tokenizer,
)
from megamuon.arguments.checks_training import (
    check_batches,
    check_bounds,
    check_duration,
    check_optimizer,
    check_positions,
    check_precision,
    check_required,
    check_schedule,
    check_shape,
)
from megamuon.arguments.config import Config
from megamuon.arguments.run_context import RunContext

Check = Callable[[Config, RunContext], list[str]]

CHECKS: tuple[Check, ...] = (
    check_required,
    check_bounds,
    check_shape,
    check_positions,
    check_batches,
    check_duration,
    check_schedule,
    check_optimizer,
    check_precision,
    check_grid,
    check_tensor_parallel,
    check_line,
    check_stages,
    check_ownership,
    check_experts,
    check_recompute,
    check_saving,
    check_loading,
    check_data,
    check_tokenizer,
    check_logging,
    check_profiling,
    check_exit,
)


def problems_of(config: Config, context: RunContext) -> list[str]:
    """Every problem that any check finds, in the order of the checks."""
    return [problem for check in CHECKS for problem in check(config, context)]
