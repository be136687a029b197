"""What a run says about itself at its start: grid, plan, optimizer, memory of the runtime.

Owns these lines.  Pure: values in, text out; no clock, no collective.  Tested by
``tests/training/test_descriptions.py``.
"""

from __future__ import annotations

from megamuon.arguments import Config
from megamuon.matrices import Route
from megamuon.mesh import Mesh
from megamuon.ownership import OwnershipPlan, summarize
from megamuon.runtime import TrainableRuntime


def describe_plan(plan: OwnershipPlan, *, reused: bool) -> str:
    """Two lines: the plan's identity, and how even it is; one where nobody owns anything."""
    report = summarize(plan)
    if not report.units:
        return f"plan {plan.digest[:16]}: even slices of every parameter, no owners"
    rails = ", ".join(f"{rail.mib:.1f}" for rail in report.rails[:8])
    more = ", ..." if len(report.rails) > 8 else ""
    origin = "from the checkpoint" if reused else "made now"
    return (
        f"ownership plan {plan.digest[:16]} ({origin}): {report.units} units on"
        f" {plan.topology.world} ranks, {report.idle_ranks} of them idle\n"
        f"  MiB per rail: {rails}{more} | busiest over mean: NS time"
        f" {report.busiest_over_mean_ns:.3f}, bytes {report.busiest_over_mean_bytes:.3f}"
    )


def describe_grid(config: Config, mesh: Mesh) -> str:
    """One line: the line of work, and how the ranks are laid out."""
    flags, owners = config.parallel, config.ownership
    replicas = (
        f"{mesh.replicas} replicas of {mesh.shards} ranks"
        if mesh.replicas > 1
        else f"{mesh.shards} ranks"
    )
    tp = f" x {mesh.tp} tensor-parallel" if mesh.tp > 1 else ""
    publishes = mesh.replicas > 1 and owners.param_layout == "owner"
    publish = f" | publish {flags.publish}" if publishes else ""
    return (
        f"line {owners.line} | {flags.sharding} on {replicas}{tp} | ZeRO-{flags.zero_stage} |"
        f" layout {owners.param_layout}, collectives {owners.collectives}, matrix update"
        f" {owners.matrix_update}{publish}"
    )


def runtime_line(runtime: TrainableRuntime) -> str:
    """What this rank's runtime holds between steps in MB, and how gradients reached it."""
    held = " | ".join(
        f"{kind.replace('_', ' ')}: {size / 1e6:.2f}" for kind, size in runtime.memory().items()
    )
    share = runtime.copied_share()
    return f"[owner runtime] memory (MB) | {held} | gradient bytes copied into buffers: {share:.2%}"


def describe_optimizer(config: Config, runtime: TrainableRuntime) -> str:
    """The recipe in one line: the optimizer's numbers, and how many matrices it has."""
    routes = summarize(runtime.plan).routes
    flags, settings = config.optimizer, runtime.config.optimizer
    # The route of whole matrices is called after the first optimizer that took it.
    routes = {
        flags.optimizer if name == Route.MATRIX else name: n for name, n in routes.items() if n
    }
    counts = ", ".join(f"{route} {count}" for route, count in routes.items())
    says = settings.recipe.describe(settings.matrix, flags)
    parts = [f"optimizer {flags.optimizer}", *says]
    return " | ".join([*parts, f"parameters by route: {counts}"])
