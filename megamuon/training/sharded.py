"""The model of a run: built, cut over tensor-parallel ranks, sharded over the others.

Owns the order of these and who fills the weights.  Invariants: initial weights are made whole, by
name, so that they do not depend on how the model lies on the ranks; a model on the meta device is
never made for real in one place, but for buffers that only a constructor can compute. Tested by
``tests/training/test_sharded.py`` and ``tests/distributed/test_pretrain_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megamuon.arguments import Config
from megamuon.mesh import Mesh, new_group
from megamuon.optim.ns_plan import CpuDtype
from megamuon.ownership import OwnershipPlan
from megamuon.placements import Placed
from megamuon.runtime import TrainableRuntime, shard
from megamuon.runtime.module_buffers import buffers_without_reset
from megamuon.sharding import apply_sharding, plan_sharding
from megamuon.training.builders import runtime_config
from megamuon.training.failures import TrainingError

ModelProvider = Callable[..., nn.Module]
Fill = Callable[[str, Tensor, torch.Generator], None]


def build_model(provider: ModelProvider, seed: int) -> nn.Module:
    """The provider's model: on the meta device if it fills its own weights, else made for real."""
    with torch.device("meta"):
        model = provider(pre_process=True, post_process=True)
    if hasattr(model, "initialise_"):
        if any(buffers_without_reset(model)):
            _take_buffers(model, provider, seed)
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same weights on every rank
        return provider(pre_process=True, post_process=True)


def _take_buffers(model: nn.Module, provider: ModelProvider, seed: int) -> None:
    """Give ``model``, which is on the meta device, the buffers of one that is made for real: what
    a constructor computes for a buffer is written nowhere else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = provider(pre_process=True, post_process=True)
    for path, module in made.named_modules():
        model.get_submodule(path)._buffers.update(module._buffers)


def _filler(model: nn.Module) -> Fill | None:
    """The model's own way of filling a whole parameter, if it has one."""
    fill = getattr(model, "initialise_", None)
    if fill is None:
        return None

    def initial(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        fill(name, tensor, generator)

    return initial


def _copier(model: nn.Module) -> Fill:
    """Initial weights from those that ``model`` was made with."""
    made = dict(model.named_parameters(remove_duplicate=False))

    def initial(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        with torch.no_grad():
            tensor.copy_(made[name])

    return initial


def build_runtime(
    provider: ModelProvider,
    config: Config,
    mesh: Mesh,
    *,
    layers: Sequence[type[nn.Module]] | None = None,
    plan: OwnershipPlan | None = None,
    ns_cpu_dtype: CpuDtype = "fp32",
) -> TrainableRuntime:
    """The provider's model on the ranks of ``mesh``, as the flags say: ``.model`` of the runtime.

    ``layers``: classes of the layer groups, else the model's ``layer_classes``.  ``plan``: a stored
    one, for ``shard`` to reuse.  ``ns_cpu_dtype``: see ``training.ns_dtype``.  A collective.
    Raises TrainingError, and what ``plan_sharding``, ``shard`` and ``fully_shard_model`` raise.
    """
    model = build_model(provider, config.training.seed)
    layers = layers or getattr(model, "layer_classes", None)
    if not layers:
        raise TrainingError(
            f"{type(model).__name__} has no layer_classes: pass layers=(LayerClass,) to pretrain"
        )
    settings = runtime_config(config, ns_cpu_dtype=ns_cpu_dtype)
    placements, initial = None, _filler(model)
    if mesh.tp > 1:
        placements, initial = _cut(model, provider, config, mesh)
    if config.ownership.collectives == "fsdp2":
        # Late: torch's fully_shard takes as long to import as torch, and only line A uses it.
        from megamuon.baselines.fully_sharded import fully_shard_model

        return fully_shard_model(
            model,
            layers=tuple(layers),
            config=settings,
            mesh=mesh,
            placements=placements,
            initial=initial,
            device=mesh.device,
        )
    return shard(
        model,
        layers=tuple(layers),
        config=settings,
        mesh=mesh,
        placements=placements,
        initial=initial,
        plan=plan,
        device=mesh.device,
    )


def _cut(
    model: nn.Module, provider: ModelProvider, config: Config, mesh: Mesh
) -> tuple[Mapping[str, Placed], Fill]:
    """Leave ``model`` its pieces of what tensor parallelism cuts.  Weights are made whole: by the
    model itself, else they are those of a second one that stays as it is.
    """
    flags = config.parallel
    plan = plan_sharding(model, tp=mesh.tp, sequence_parallel=flags.sequence_parallel)
    apply_sharding(model, plan, tp_rank=mesh.tp_rank, group=new_group(mesh, "tp"))
    fill = _filler(model) or _copier(build_model(provider, config.training.seed))
    return plan.placements, fill
