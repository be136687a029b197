"""The checkpoint that a run starts from, and the check that it fits the flags.

Owns the choice (``--load``, ``--pretrained-checkpoint``) and the comparison of everything that
shapes the model, its training or the order of its data.  Invariants: a resume goes on with what the
checkpoint was trained with, or with what ``--override-checkpoint-args`` names, or not at all; every
difference is named with its flag and both values.  Tested by
``tests/training/test_resume_checks.py`` and ``tests/training/test_checkpointing.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megamuon.arguments import Config
from megamuon.arguments.resume import (
    DIGESTS,
    OF_THE_ORDER,
    Difference,
    differences,
    model_differences,
)
from megamuon.checkpoint import (
    RELEASE,
    CheckpointError,
    Iteration,
    Ranks,
    latest,
    read_documents,
)
from megamuon.conversion.folder_files import (
    DOCUMENT,
    check_rows,
    folder_document,
    with_kept_tokenizer,
)
from megamuon.data.identity import identity_difference
from megamuon.mesh import Mesh
from megamuon.optim.ns_plan import CpuDtype
from megamuon.ownership import OwnershipPlan, PlanError, Topology
from megamuon.training.failures import TrainingError
from megamuon.training.folders import is_hugging_face, other_weights, read_folder_args

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint that a run starts from."""

    directory: Path
    iteration: Iteration
    documents: Mapping[str, Any]
    weights_only: bool  # --finetune, --pretrained-checkpoint, or a release
    foreign: bool = False  # a Hugging Face folder: its documents are made from it

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
        """The stored plan, where it is for a grid of the same replicas, shards and tensor-parallel
        ranks.
        """
        ours = Topology(replicas=mesh.replicas, shards=mesh.shards, tp=mesh.tp)
        return self.plan if self.plan is not None and self.plan.topology == ours else None

    @property
    def arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """The flags of the run that saved, by component."""
        return self.documents.get("args", {})

    @property
    def optimizer(self) -> str | None:
        """``--optimizer`` of the run that saved."""
        return self.arguments.get("optimizer", {}).get("optimizer")

    @property
    def run(self) -> str | None:
        """Which run saved it; see ``training.outputs``."""
        return self.documents.get("run", {}).get("id")

    def __str__(self) -> str:
        return f"{self.directory}{'' if self.foreign else f' iteration {self.iteration}'}"


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
        found = read_documents(Path(directory), iteration, ranks=alone)["args"]
        tokenizer = with_kept_tokenizer(found["tokenizer"], Path(directory))
        return {**found, "tokenizer": tokenizer}
    except (CheckpointError, KeyError) as error:
        raise ValueError(str(error)) from error


def find_source(config: Config, ranks: Ranks, warn: Say) -> Source | None:
    """The checkpoint to start from; None: random weights.  Raises TrainingError and others.

    A Hugging Face folder yields to what ``--save`` holds already.  ``warn`` gets a line that must
    not be lost among others.
    """
    flags = config.checkpoint
    if flags.load is not None:
        directory = Path(flags.load)
        if ranks.first("look into --load", lambda: is_hugging_face(directory)):
            return _saved_since(config, ranks) or _folder(config, directory, ranks, "--load")
        iteration = latest(directory, ranks=ranks, step=flags.ckpt_step)
        if iteration is not None:
            weights_only = flags.finetune or iteration == RELEASE
            return _source(directory, iteration, ranks, weights_only=weights_only)
        if found := ranks.first("look into --load", lambda: other_weights(directory)):
            raise TrainingError(
                f"--load {directory} holds {found}, and no checkpoint of this program: give the"
                " folder that has latest_checkpointed_iteration.txt, or a Hugging Face folder"
                " (config.json with a model_type, and safetensors)"
            )
        text = f"no checkpoint in --load {directory} (no latest_checkpointed_iteration.txt there)"
        if flags.exit_on_missing_checkpoint:
            raise TrainingError(f"{text}, and --exit-on-missing-checkpoint is set")
        instead = flags.pretrained_checkpoint or "random weights"
        warn(f"WARNING: {text}: starting from {instead}")
    if flags.pretrained_checkpoint is None:
        return None
    directory = Path(flags.pretrained_checkpoint)
    if ranks.first("look into --pretrained-checkpoint", lambda: is_hugging_face(directory)):
        saved = _saved_since(config, ranks) if flags.load is None else None
        return saved or _folder(config, directory, ranks, "--pretrained-checkpoint")
    iteration = latest(directory, ranks=ranks)
    if iteration is None:
        raise TrainingError(f"no checkpoint in --pretrained-checkpoint {directory}")
    return _source(directory, iteration, ranks, weights_only=True)


def _saved_since(config: Config, ranks: Ranks) -> Source | None:
    """What a run that began with a Hugging Face folder has saved since."""
    flags = config.checkpoint
    if flags.save is None or flags.finetune:
        return None
    iteration = latest(Path(flags.save), ranks=ranks, step=flags.ckpt_step)
    if iteration is None:
        return None
    return _source(Path(flags.save), iteration, ranks, weights_only=iteration == RELEASE)


def _folder(config: Config, directory: Path, ranks: Ranks, flag: str) -> Source:
    """A Hugging Face folder."""
    save = config.checkpoint.save
    if save is not None and os.path.realpath(save) == os.path.realpath(directory):
        raise TrainingError(f"--save {save} is the folder of {flag}: name another one")

    def read() -> Mapping[str, Any]:
        folder = folder_document(directory, {})
        rows = config.tokenizer.padded_vocab_size or folder["config"].get("vocab_size", 0)
        check_rows(directory, rows)
        return {"args": read_folder_args(str(directory)), DOCUMENT: folder}

    return Source(
        directory=directory,
        iteration=RELEASE,
        documents=ranks.first("read the folder", read),
        weights_only=True,
        foreign=True,
    )


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


def check_arguments(config: Config, source: Source, say: Say) -> bool:
    """Whether the samples come in another order than the checkpoint's, as was asked for.

    Raises TrainingError naming everything that differs and may not.  ``say`` gets a line for each
    difference that was allowed.
    """
    stored = source.arguments
    if source.weights_only or config.training.skip_train:
        # A new run from these weights, or a look at them: only their meaning counts.
        for difference in model_differences(stored, config):
            say(f"WARNING: {source}: {difference}: the weights were trained with the former")
        return False
    flags = config.checkpoint
    allowed = frozenset(flags.override_checkpoint_args or ())
    without = ("optimizer",) if flags.no_load_optim else ()
    found = differences(stored, config, without=without)
    _refuse(source, [difference for difference in found if difference.dest not in allowed])
    if not flags.no_load_optim and stored.get("checkpoint", {}).get("no_save_optim"):
        raise TrainingError(
            f"{source} was saved with --no-save-optim: add --no-load-optim or --finetune"
        )
    for difference in found:
        say(f"note: {difference}, by --override-checkpoint-args")
    return any(difference.dest in OF_THE_ORDER for difference in found)


def _refuse(source: Source, found: list[Difference]) -> None:
    if not found:
        return
    names = " ".join(difference.dest for difference in found)
    raise TrainingError(
        f"{source} does not fit the flags: {'; '.join(map(str, found))}. Give the checkpoint's"
        f" values, or --override-checkpoint-args {names} to go on with these, or --finetune to"
        " start anew from the weights (--use-checkpoint-args takes model and tokenizer flags from"
        " the checkpoint)"
    )


def check_identity(
    config: Config, source: Source, present: Mapping[str, Any], say: Say
) -> frozenset[str]:
    """Which of ``DIGESTS`` are others than the checkpoint's, as was asked for.

    ``present`` has the identities of this launch; what is not in both is not compared.  Raises
    TrainingError naming what differs and may not.
    """
    stored = source.documents.get("identity", {})
    allowed = frozenset(config.checkpoint.override_checkpoint_args or ())
    problems, changed = [], set()
    for name, dest in DIGESTS.items():
        text = identity_difference(stored.get(name), present.get(name))
        if text is None:
            continue
        if dest in allowed:
            changed.add(name)
            say(f"note: another {name} than the checkpoint's ({text}), by {dest}")
        else:
            problems.append((f"the {name} is another one: {text}", dest))
    if problems:
        raise TrainingError(
            f"{source} was trained with other data: {'; '.join(text for text, _ in problems)}."
            " Give the same tokenizer, --data-path and --split, or --override-checkpoint-args"
            f" {' '.join(dest for _, dest in problems)} to go on with these (new data is drawn from"
            " its beginning)"
        )
    return frozenset(changed)
