"""What a training run saves and how it takes up a saved one.

Owns the documents of a checkpoint (arguments, counters, schedule, plan, identities, random states),
what a resume does with them, and which checkpoints may be retired.  Invariants: nothing of a
checkpoint is used before all of it was checked; a resume at the same size reuses the stored plan;
the newest checkpoint from which a step was made is never retired; ranks succeed or fail together.
Tested by ``tests/training/test_checkpointing.py`` and
``tests/distributed/test_pretrain_resume.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megamuon.arguments import Config, config_to_nested
from megamuon.checkpoint import (
    CheckpointError,
    Checkpoints,
    Iteration,
    Loaded,
    Ranks,
    SaveHandle,
    StoredTensor,
    append_progress,
    capture_rng,
    load,
    load_indexed,
    restore_rng,
)
from megamuon.checkpoint.tensors import TensorIndex
from megamuon.conversion import FAMILIES, folder_index
from megamuon.conversion.folder_files import DOCUMENT
from megamuon.matrices import Route
from megamuon.mesh import Mesh
from megamuon.optim import RECIPES, Schedule, rest_of
from megamuon.runtime import TrainableRuntime
from megamuon.runtime.trainable import OPTIMIZER_PREFIX
from megamuon.training.failures import TrainingError
from megamuon.training.logging import Console
from megamuon.training.ns_dtype import is_open
from megamuon.training.progress import Progress
from megamuon.training.source import Source

FORMAT = "safetensors"  # what the messages name


def _owner_of_state(name: str) -> str:
    """The parameter that a tensor called ``optimizer.<state>.<parameter>`` belongs to."""
    return name.removeprefix(OPTIMIZER_PREFIX).split(".", 1)[1]


class RunCheckpoints:
    """The checkpoints of one training run."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        ranks: Ranks,
        console: Console,
        *,
        run: str | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """``run`` names the run, ``identity`` its data and tokenizer; both go into every
        checkpoint.
        """
        self.config = config
        self.mesh = mesh
        self.ranks = ranks
        self.console = console
        self.run = run
        self.identity = dict(identity or {})
        self.folder: dict[str, Any] = {}  # what an export needs of the folder that it began with
        flags = config.checkpoint
        self._store = Checkpoints(Path(flags.save), ranks) if flags.save is not None else None
        self._announce: tuple[Progress, SaveHandle] | None = None
        self.last_saved: int | None = None
        self._held: list[int] = []  # own checkpoints in the save directory, oldest first
        self._newest: tuple[Path, Iteration] | None = None  # loaded or saved last
        self._stepped = False  # since then
        self._good: tuple[Path, Iteration] | None = None
        self._before = (self._newest, self._stepped)  # what to go back to if a save fails
        self._failures = 0  # of saves, in a row

    # --- loading ---------------------------------------------------------------------------------

    def resume(
        self, source: Source, runtime: TrainableRuntime, schedule: Schedule | None
    ) -> Progress:
        """Fill the runtime and the schedule from ``source``; returns the counters to go on from."""
        flags, where = self.config.checkpoint, source.directory
        optimizer = not (source.weights_only or flags.no_load_optim)
        what = "Hugging Face folder" if source.foreign else "distributed checkpoint"
        at = "" if source.foreign else f" at iteration {source.iteration}"
        self.console.first(f" loading {what} from {where}{at}")
        if isinstance(problem := source.plan_or_problem, str):
            self.console.first(f"WARNING: the ownership plan in {where} is not used: {problem}")
        wanted = runtime.state(optimizer=optimizer, everywhere=True)
        whole = optimizer and source.optimizer in (None, self.config.optimizer.optimizer)
        if optimizer and not whole:
            wanted = self._state_that_stays(source, runtime, wanted)
        if source.foreign:
            index = self._folder_index(source, runtime)
            loaded = load_indexed(where, index, wanted, ranks=self.ranks)
        else:
            ignore = () if whole else (OPTIMIZER_PREFIX,)
            loaded = load(where, source.iteration, wanted, ranks=self.ranks, ignore=ignore)
        runtime.loaded()
        self._report_filled(loaded, runtime)
        progress = Progress()
        self._newest = (where, source.iteration)
        if not source.weights_only:
            progress = Progress.from_document(source.documents["counters"])
            self._take_over(source, progress)
            if schedule is not None and optimizer:
                self._resume_schedule(source, schedule)
            self._resume_rng(source)
        self.console.first(
            f"  successfully loaded checkpoint from {where} [ t 1/1, p 1/1 ]"
            f" at iteration {progress.iteration}"
        )
        return progress

    def _folder_index(self, source: Source, runtime: TrainableRuntime) -> TensorIndex:
        """Where the model's weights lie in a Hugging Face folder; says what is not used."""
        family = FAMILIES[source.documents[DOCUMENT]["config"]["model_type"]]
        shapes = {parameter.name: parameter.shape for parameter in runtime.plan.parameters}
        found = self.ranks.first(
            "read index", lambda: folder_index(source.directory, family, shapes)
        )
        for line in found.named:
            self.console.first(f"  not used: {line}")
        return found.index

    def _report_filled(self, loaded: Loaded, runtime: TrainableRuntime) -> None:
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
        self, source: Source, runtime: TrainableRuntime, wanted: list[StoredTensor]
    ) -> list[StoredTensor]:
        """``wanted`` without the optimizer state that another optimizer would misread: what
        neither takes whole goes on, where both train it alike.  Says how much is new.
        """
        ours = self.config.optimizer.optimizer
        parameters = {p.name for p in runtime.plan.parameters if p.trainable}
        kept: set[str] = set()
        theirs = source.optimizer
        same_rest = theirs in RECIPES and rest_of(ours) is rest_of(theirs)
        if source.plan is not None and same_rest:
            before = {p.name for p in source.plan.parameters if p.route is not Route.MATRIX}
            after = {p.name for p in runtime.plan.parameters if p.route is not Route.MATRIX}
            kept = before & after & parameters
        self.console.first(
            f"  optimizer changed from {theirs} to {ours}: weights are kept; the"
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
        if places != mesh.places:
            word = "ranks" if stored == mesh.tp == 1 else "data-parallel ranks"
            self.console.first(
                f"random states of {places} {word} do not fit {mesh.places} {word}:"
                " continuing with fresh seeds"
            )
        else:  # the tensor-parallel ranks of a place draw alike, so the first one's serves all
            restore_rng(states[mesh.place * stored])

    def _take_over(self, source: Source, progress: Progress) -> None:
        """The checkpoints of the launches before are this run's to keep and to retire."""
        save = self.config.checkpoint.save
        if save is None or os.path.realpath(save) != os.path.realpath(source.directory):
            progress.last_good_iteration = None  # it speaks of another directory
            return
        if progress.last_good_iteration is not None:
            self._good = (Path(save), progress.last_good_iteration)
            self._held.append(progress.last_good_iteration)
        self._held.append(progress.iteration)
        self._newest = (Path(save), progress.iteration)

    # --- what is good ----------------------------------------------------------------------------

    def applied(self) -> None:
        """A step was made: what was loaded or saved last has proved to be good."""
        self._stepped = True

    def last_good(self) -> str:
        """The newest checkpoint from which a step was made, in words.  Call it on all ranks."""
        self.finish()
        self._settle()
        if self._good is None:
            return "no checkpoint of this run is known to be good"
        directory, iteration = self._good
        return f"the last good checkpoint is iteration {iteration} in {directory}"

    def _settle(self) -> None:
        if self._stepped and self._newest is not None:
            self._good = self._newest

    # --- saving ----------------------------------------------------------------------------------

    def _measured(self, runtime: TrainableRuntime) -> dict[str, Any]:
        """What this run measured on its machine, which a resume keeps."""
        schulz = runtime.config.optimizer.newton_schulz
        if schulz is None or not is_open(self.config, self.mesh):
            return {}
        return {"ns_cpu_dtype": schulz.cpu_dtype}

    def save(self, progress: Progress, runtime: TrainableRuntime, schedule: Schedule) -> None:
        """Save now, or start to with ``--async-save``.  Collective; nothing without ``--save``."""
        if self._store is None or self.last_saved == progress.iteration:
            return
        flags, directory = self.config.checkpoint, self._store.directory
        self.finish()
        self._settle()
        if self._good is not None and self._good[0] == directory:
            good = self._good[1]
            # A release has no number, and nothing ever retires it.
            progress.last_good_iteration = good if isinstance(good, int) else None
        self.console.first(
            f"saving checkpoint at iteration {progress.iteration:7d} to {directory}"
            f" in {FORMAT} format"
        )
        try:
            handle = self._store.save(
                progress.iteration,
                runtime.state(optimizer=not flags.no_save_optim),
                documents={
                    "args": config_to_nested(self.config),
                    "counters": asdict(progress),
                    "schedule": schedule.state_dict(),
                    "plan": json.loads(runtime.plan.to_json()),
                    "identity": self.identity,
                    "run": {"id": self.run},
                    "measured": self._measured(runtime),
                    **({DOCUMENT: self.folder} if self.folder else {}),
                },
                rank_documents={} if flags.no_save_rng else {"rng": capture_rng()},
                asynchronous=flags.async_save,
                retain_interval=flags.save_retain_interval,
                retired=[held for held in self._held if held != progress.last_good_iteration],
                run=self.run,
            )
        except CheckpointError as error:
            self._failed(error, progress)
            return
        self.last_saved = progress.iteration
        self._announce = (progress, handle)
        self._before = (self._newest, self._stepped)
        self._newest, self._stepped = (directory, progress.iteration), False
        if not flags.async_save:
            self.finish()

    def poll(self) -> None:
        """Say that a save in the background has ended, once it has.  No collective."""
        if self._announce is None or not self._announce[1].done():
            return
        try:
            report = self._announce[1].wait()
        except CheckpointError:
            return  # the next finish() raises it on all ranks alike
        self._announce = None
        assert self._store is not None and isinstance(report.iteration, int)
        self.console.first(
            f"  successfully saved checkpoint from iteration {report.iteration:7d} to"
            f" {self._store.directory} [ t 1/1, p 1/1 ]"
            f" ({report.size / 1e6:.1f} MB in {report.seconds:.2f} s)"
        )
        if report.not_deleted is not None:
            self.console.first(f"WARNING: an old checkpoint stays: {report.not_deleted}")
        self.event(f"Saved checkpoint\tIteration: {report.iteration}")

    def finish(self) -> None:
        """Wait for a save under way.  Call it on all ranks; raises its CheckpointError."""
        if self._store is None:
            return
        announced = self._announce
        try:
            report = self._store.wait()
        except CheckpointError as error:
            assert announced is not None
            self._announce = None
            self._newest, before = self._before
            self._stepped = self._stepped or before
            self._failed(error, announced[0])
        else:
            if report is not None:
                self._completed(report.iteration)
        self.poll()

    def _completed(self, iteration: int) -> None:
        self._failures = 0
        interval = self.config.checkpoint.save_retain_interval
        good = self._good[1] if self._good is not None else None
        if interval is not None:  # else nothing is ever deleted
            self._held = [held for held in self._held if held == good]
        self._held.append(iteration)

    def _failed(self, error: CheckpointError, progress: Progress) -> None:
        """Count a failed save.  Raises its error, or TrainingError where too many have failed."""
        fault = self.config.fault
        if fault.save_failure == "fatal":
            raise error
        self.last_saved = None
        self._failures += 1
        progress.failed_saves += 1
        if self._failures >= fault.max_failed_saves:
            raise TrainingError(
                f"{self._failures} saves in a row have failed (--max-failed-saves): {error};"
                f" {self.last_good()}"
            )
        self.console.first(
            f"WARNING: {error}; going on (--save-failure warn; {self._failures} in a row,"
            f" {progress.failed_saves} in all)"
        )

    def check_saved(self, progress: Progress) -> None:
        """Raise TrainingError where the run ends and its last state could not be saved."""
        self.finish()
        if self._store is not None and self._failures:
            raise TrainingError(
                f"the run ends at iteration {progress.iteration} and its state could not be saved:"
                f" {self.last_good()}"
            )

    def event(self, text: str) -> None:
        """A line of ``progress.txt``, with ``--log-progress``; a file that cannot be written is
        no reason to fail.
        """
        flags = self.config.checkpoint
        if not flags.log_progress or flags.save is None or self.mesh.rank != 0:
            return
        try:
            append_progress(
                Path(flags.save),
                text,
                world_size=self.mesh.world_size,
                job=os.environ.get("SLURM_JOB_ID", ""),
            )
        except OSError as error:
            self.console.first(f"WARNING: --log-progress: {error}; the line was {text!r}")
