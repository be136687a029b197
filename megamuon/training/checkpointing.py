"""What a training run saves and how it takes up a saved one.

Owns the documents of a checkpoint (arguments, counters, schedule, plan, random states), which
checkpoint a run starts from, and what must be equal on resume.  Invariants: nothing of a
checkpoint is used before all of it was checked; a resume at the same size reuses the stored plan;
ranks succeed or fail together. Tested by ``tests/training/test_checkpointing.py`` and
``tests/distributed/test_pretrain_resume.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megamuon.arguments import Config, config_to_nested
from megamuon.checkpoint import (
    RELEASE,
    CheckpointError,
    Checkpoints,
    Iteration,
    Loaded,
    Ranks,
    SaveHandle,
    StoredTensor,
    append_progress,
    capture_rng,
    latest,
    load,
    read_documents,
    restore_rng,
)
from megamuon.matrices import Route
from megamuon.mesh import Mesh
from megamuon.optim import Schedule
from megamuon.optim.ns_plan import CpuDtype
from megamuon.ownership import OwnershipPlan, PlanError, Topology
from megamuon.runtime import Runtime
from megamuon.training.failures import TrainingError
from megamuon.training.logging import Console
from megamuon.training.ns_dtype import is_open

OPTIMIZER_PREFIX = "optimizer."
FORMAT = "safetensors"  # what the messages name
# (component, dest): what decides the model that the weights belong to.
MUST_MATCH: tuple[tuple[str, str], ...] = (
    ("model", "num_layers"),
    ("model", "hidden_size"),
    ("model", "ffn_hidden_size"),
    ("model", "num_attention_heads"),
    ("model", "num_query_groups"),
    ("model", "kv_channels"),
    ("model", "position_embedding_type"),
    ("model", "rotary_percent"),
    ("model", "rotary_interleaved"),
    ("model", "normalization"),
    # The same shapes with another meaning, so the load itself would not notice.
    ("model", "layernorm_zero_centered_gamma"),
    ("model", "swiglu"),
    ("model", "squared_relu"),
    ("model", "openai_gelu"),
    ("model", "add_qkv_bias"),
    ("model", "qk_layernorm"),
    ("model", "untie_embeddings_and_output_weights"),
    ("model", "num_experts"),
    ("model", "moe_router_topk"),
    ("model", "moe_ffn_hidden_size"),
    ("model", "moe_shared_expert_intermediate_size"),
    ("model", "moe_shared_expert_gate"),
    ("model", "moe_router_norm_topk_prob"),
    ("tokenizer", "tokenizer_type"),
)


@dataclass(kw_only=True)
class Progress:
    """How far a run has come; the counters of a checkpoint."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    floating_point_operations: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint that a run starts from."""

    directory: Path
    iteration: Iteration
    documents: Mapping[str, Any]
    weights_only: bool  # --finetune, --pretrained-checkpoint, or a release

    @cached_property
    def plan_or_problem(self) -> OwnershipPlan | str | None:
        """The plan of the run that saved, or why it cannot be read: another release wrote it."""
        stored = self.documents.get("plan")
        try:
            return None if stored is None else OwnershipPlan.from_json(json.dumps(stored))
        except PlanError as error:
            return str(error)

    @property
    def plan(self) -> OwnershipPlan | None:
        """The plan of the run that saved, where it can be read."""
        return None if isinstance(self.plan_or_problem, str) else self.plan_or_problem

    def plan_for(self, mesh: Mesh) -> OwnershipPlan | None:
        """The stored plan, where it is for a grid of the same rows, columns and tensor-parallel
        ranks.
        """
        ours = Topology(rows=mesh.rows, columns=mesh.columns, tp=mesh.tp)
        return self.plan if self.plan is not None and self.plan.topology == ours else None

    @property
    def optimizer(self) -> str | None:
        """``--optimizer`` of the run that saved."""
        return self.documents.get("args", {}).get("optimizer", {}).get("optimizer")


def read_checkpoint_args(
    directory: str, step: int | None
) -> Mapping[str, Mapping[str, Any]] | None:
    """The arguments stored in a checkpoint, read by this process alone
    (``--use-checkpoint-args``).
    """
    alone = Ranks()
    try:
        iteration = latest(Path(directory), ranks=alone, step=step)
        if iteration is None:
            return None
        return read_documents(Path(directory), iteration, ranks=alone)["args"]
    except (CheckpointError, KeyError) as error:
        raise ValueError(str(error)) from error


def find_source(config: Config, ranks: Ranks, console: Console) -> Source | None:
    """The checkpoint to start from; None: random weights.  Raises TrainingError and others."""
    flags = config.checkpoint
    if flags.load is not None:
        directory = Path(flags.load)
        iteration = latest(directory, ranks=ranks, step=flags.ckpt_step)
        if iteration is not None:
            weights_only = flags.finetune or iteration == RELEASE
            return _source(directory, iteration, ranks, weights_only=weights_only)
        text = f"no checkpoint in --load {directory} (no latest_checkpointed_iteration.txt there)"
        if flags.exit_on_missing_checkpoint:
            raise TrainingError(f"{text}, and --exit-on-missing-checkpoint is set")
        instead = flags.pretrained_checkpoint or "random weights"
        console.first(f"WARNING: {text}: starting from {instead}")
    if flags.pretrained_checkpoint is None:
        return None
    directory = Path(flags.pretrained_checkpoint)
    iteration = latest(directory, ranks=ranks)
    if iteration is None:
        raise TrainingError(f"no checkpoint in --pretrained-checkpoint {directory}")
    return _source(directory, iteration, ranks, weights_only=True)


def _source(directory: Path, iteration: Iteration, ranks: Ranks, *, weights_only: bool) -> Source:
    return Source(
        directory=directory,
        iteration=iteration,
        documents=read_documents(directory, iteration, ranks=ranks),
        weights_only=weights_only,
    )


def stored_cpu_dtype(source: Source | None) -> CpuDtype | None:
    """What ``--ns-dtype auto`` was in the run that this one resumes; None where nothing resumes
    or nothing was chosen.  Releases that stored nothing iterated in FP32.
    """
    if source is None or source.weights_only:
        return None
    return source.documents.get("measured", {"ns_cpu_dtype": "fp32"}).get("ns_cpu_dtype")


def check_arguments(config: Config, source: Source) -> None:
    """Raise TrainingError naming everything that differs and may not."""
    if source.weights_only:
        return  # shapes are checked by the load itself
    ours, theirs = config_to_nested(config), source.documents.get("args", {})
    problems = [
        f"{dest} is {theirs[component][dest]!r} in the checkpoint"
        f" and {ours[component][dest]!r} here"
        for component, dest in MUST_MATCH
        if dest in theirs.get(component, {}) and theirs[component][dest] != ours[component][dest]
    ]
    if problems:
        raise TrainingError(
            f"{source.directory} iteration {source.iteration} does not fit the flags: "
            + "; ".join(problems)
            + ". Give the checkpoint's values, or --use-checkpoint-args"
        )
    if config.checkpoint.no_load_optim:
        return
    if theirs.get("checkpoint", {}).get("no_save_optim"):
        raise TrainingError(
            f"{source.directory} iteration {source.iteration} was saved with --no-save-optim:"
            " add --no-load-optim or --finetune"
        )


def _owner_of_state(name: str) -> str:
    """The parameter that a tensor called ``optimizer.<state>.<parameter>`` belongs to."""
    return name.removeprefix(OPTIMIZER_PREFIX).split(".", 1)[1]


class RunCheckpoints:
    """The checkpoints of one training run."""

    def __init__(self, config: Config, mesh: Mesh, ranks: Ranks, console: Console) -> None:
        self.config = config
        self.mesh = mesh
        self.ranks = ranks
        self.console = console
        flags = config.checkpoint
        self._store = Checkpoints(Path(flags.save), ranks) if flags.save is not None else None
        self._announce: tuple[int, SaveHandle] | None = None
        self.last_saved: int | None = None

    # --- loading ---------------------------------------------------------------------------------

    def resume(self, source: Source, runtime: Runtime, schedule: Schedule | None) -> Progress:
        """Fill the runtime and the schedule from ``source``; returns the counters to go on from."""
        flags, where = self.config.checkpoint, source.directory
        optimizer = not (source.weights_only or flags.no_load_optim)
        self.console.first(
            f" loading distributed checkpoint from {where} at iteration {source.iteration}"
        )
        if isinstance(problem := source.plan_or_problem, str):
            self.console.first(f"WARNING: the ownership plan in {where} is not used: {problem}")
        wanted = runtime.state(optimizer=optimizer, everywhere=True)
        whole = optimizer and source.optimizer in (None, self.config.optimizer.optimizer)
        if optimizer and not whole:
            wanted = self._state_that_stays(source, runtime, wanted)
        loaded = load(
            where,
            source.iteration,
            wanted,
            ranks=self.ranks,
            ignore=() if whole else (OPTIMIZER_PREFIX,),
        )
        runtime.loaded()
        self._report_filled(loaded, runtime)
        progress = Progress()
        if not source.weights_only:
            progress = Progress(**source.documents["counters"])
            if schedule is not None and optimizer:
                self._resume_schedule(source, schedule)
            self._resume_rng(source)
        self.console.first(
            f"  successfully loaded checkpoint from {where} [ t 1/1, p 1/1 ]"
            f" at iteration {progress.iteration}"
        )
        return progress

    def _report_filled(self, loaded: Loaded, runtime: Runtime) -> None:
        """Say how much was filled and what was not used.  Raises TrainingError for a weight of the
        model that was not filled, whatever the load thought it was asked for.
        """
        weights = {p.name for p in runtime.plan.parameters}
        if left := sorted(weights.difference(loaded.filled)):
            raise TrainingError(f"{len(left)} of {len(weights)} weights not filled: {left[0]}, ...")
        state = sum(name.startswith(OPTIMIZER_PREFIX) for name in loaded.filled)
        buffers, unused = len(loaded.filled) - len(weights) - state, loaded.unused
        text = f"  filled {len(weights)} of {len(weights)} weights and {state} optimizer tensors"
        if buffers:
            text += f", {buffers} buffers"
        if unused:
            text += f"; {len(unused)} tensors of the checkpoint are not used, e.g. {unused[0]}"
        if loaded.widened:
            text += f"; saved in a narrower dtype: {loaded.widened[0]}, ..."
        self.console.first(text)

    def _state_that_stays(
        self, source: Source, runtime: Runtime, wanted: list[StoredTensor]
    ) -> list[StoredTensor]:
        """``wanted`` without the optimizer state that another optimizer would misread: only what
        AdamW keeps before and after goes on.  Says how much is new.
        """
        ours = self.config.optimizer.optimizer
        parameters = {p.name for p in runtime.plan.parameters if p.trainable}
        kept: set[str] = set()
        if source.plan is not None and "sgd" not in (ours, source.optimizer):
            before = {p.name for p in source.plan.parameters if p.route is not Route.MUON}
            after = {p.name for p in runtime.plan.parameters if p.route is not Route.MUON}
            kept = before & after & parameters
        self.console.first(
            f"  optimizer changed from {source.optimizer} to {ours}: weights are kept; the"
            f" optimizer state of {len(parameters) - len(kept)} parameters is new, that of"
            f" {len(kept)} goes on"
        )
        return [
            piece
            for piece in wanted
            if not piece.name.startswith(OPTIMIZER_PREFIX) or _owner_of_state(piece.name) in kept
        ]

    def _resume_schedule(self, source: Source, schedule: Schedule) -> None:
        flags = self.config.schedule
        mode = "override" if flags.override_opt_param_scheduler else "match"
        if flags.use_checkpoint_opt_param_scheduler:
            mode = "use_checkpoint"
        try:
            schedule.load_state_dict(source.documents["schedule"], mode=mode)  # type: ignore[arg-type]
        except ValueError as error:
            raise TrainingError(str(error)) from error

    def _resume_rng(self, source: Source) -> None:
        if self.config.checkpoint.no_load_rng:
            return
        states = source.documents.get("rng")
        if states is None:
            self.console.first("no random state in the checkpoint: continuing with fresh seeds")
            return
        stored = source.documents["args"].get("parallel", {}).get("tensor_model_parallel_size", 1)
        places, mesh = len(states) // stored, self.mesh
        if places != mesh.data_parallel_size:
            word = "ranks" if stored == mesh.tp == 1 else "data-parallel ranks"
            self.console.first(
                f"random states of {places} {word} do not fit {mesh.data_parallel_size} {word}:"
                " continuing with fresh seeds"
            )
        else:  # the tensor-parallel ranks of a place draw alike, so the first one's serves all
            restore_rng(states[mesh.data_parallel_rank * stored])

    # --- saving ----------------------------------------------------------------------------------

    def save(self, progress: Progress, runtime: Runtime, schedule: Schedule) -> None:
        """Save now, or start to with ``--async-save``.  Collective; nothing without ``--save``."""
        if self._store is None or self.last_saved == progress.iteration:
            return
        flags, directory = self.config.checkpoint, self._store.directory
        self.finish()
        self.console.first(
            f"saving checkpoint at iteration {progress.iteration:7d} to {directory}"
            f" in {FORMAT} format"
        )
        documents = {
            "args": config_to_nested(self.config),
            "counters": asdict(progress),
            "schedule": schedule.state_dict(),
            "plan": json.loads(runtime.plan.to_json()),
            "measured": {},
        }
        if is_open(self.config, self.mesh):
            chosen = runtime.config.optimizer.muon.newton_schulz.cpu_dtype
            documents["measured"] = {"ns_cpu_dtype": chosen}
        try:
            handle = self._store.save(
                progress.iteration,
                runtime.state(optimizer=not flags.no_save_optim),
                documents=documents,
                rank_documents={} if flags.no_save_rng else {"rng": capture_rng()},
                asynchronous=flags.async_save,
                retain_interval=flags.save_retain_interval,
            )
        except CheckpointError as error:
            self._failed(error)
            return
        self.last_saved = progress.iteration
        self._announce = (progress.iteration, handle)
        self.poll()

    def poll(self) -> None:
        """Say that a save has ended, once it has.  No collective."""
        if self._announce is None or not self._announce[1].done():
            return
        iteration, handle = self._announce
        try:
            report = handle.wait()
        except CheckpointError:
            return  # the next finish() raises it on all ranks alike
        self._announce = None
        assert self._store is not None
        self.console.first(
            f"  successfully saved checkpoint from iteration {iteration:7d} to"
            f" {self._store.directory} [ t 1/1, p 1/1 ]"
            f" ({report.size / 1e6:.1f} MB in {report.seconds:.2f} s)"
        )
        self.event(f"Saved checkpoint\tIteration: {iteration}")

    def finish(self) -> None:
        """Wait for a save under way.  Call it on all ranks; raises its CheckpointError."""
        if self._store is None:
            return
        try:
            self._store.wait()
        except CheckpointError as error:
            self._announce = None
            self._failed(error)
        self.poll()

    def _failed(self, error: CheckpointError) -> None:
        if self.config.checkpoint.save is None or self.config.fault.save_failure == "fatal":
            raise error
        self.last_saved = None
        self.console.first(f"WARNING: {error}; going on (--save-failure warn)")

    def event(self, text: str) -> None:
        """A line of ``progress.txt``, with ``--log-progress``."""
        flags = self.config.checkpoint
        if flags.log_progress and flags.save is not None and self.mesh.rank == 0:
            append_progress(
                Path(flags.save),
                text,
                world_size=self.mesh.world_size,
                job=os.environ.get("SLURM_JOB_ID", ""),
            )
