"""``pretrain``: from a parsed command line to a trained, saved and evaluated model.

Owns the order of a run: process group, seeds, tokenizer-independent building, load, datasets,
training, final save, validation, test.  Invariants: the entry script supplies providers and
nothing else; whatever happens, the caller gets an exit code and no rank is left waiting.  The
providers' contract is Megatron-LM's. Tested by ``tests/training`` and
``tests/distributed/test_pretrain_*.py``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megamuon.arguments import Config, ParsedConfig
from megamuon.checkpoint import Ranks
from megamuon.conversion.folder_files import DOCUMENT, TOKENIZER
from megamuon.data.summary import describe_data
from megamuon.mesh import Mesh, initialise, launched_local_rank, mesh_from_environment
from megamuon.metrics import Timers
from megamuon.models import GPTConfig, flops_per_token
from megamuon.optim import Schedule, ScheduleConfig
from megamuon.runtime import TrainableRuntime
from megamuon.training.builders import (
    dataset_counts,
    grid,
    sample_counts,
    schedule_config,
    train_iterations,
)
from megamuon.training.checkpointing import RunCheckpoints
from megamuon.training.command_line import check_same_flags
from megamuon.training.descriptions import describe_grid, describe_optimizer, describe_plan
from megamuon.training.exits import ExitWatch
from megamuon.training.failures import (
    DEBUG_LEVEL,
    EXIT_FAILURE,
    INPUT_ERRORS,
    Phase,
    end_process,
    forget_cause,
    leave_group,
    linger,
    report,
)
from megamuon.training.folders import keep_tokenizer
from megamuon.training.logging import (
    Console,
    RunLog,
    print_config,
    set_logging_level,
)
from megamuon.training.loop import Loop, Parts
from megamuon.training.ns_dtype import choose_cpu_dtype
from megamuon.training.outputs import claim_save_directory, run_identity, write_config
from megamuon.training.progress import Progress
from megamuon.training.reports import ForwardStep
from megamuon.training.sharded import ModelProvider, build_runtime
from megamuon.training.source import (
    Source,
    check_arguments,
    check_identity,
    find_source,
    stored_cpu_dtype,
)

DatasetsProvider = Callable[[Sequence[int]], tuple[Any, Any, Any]]
IdentityProvider = Callable[[Sequence[int]], Mapping[str, Any]]
AtEnd = Callable[[nn.Module], str | None]

# Ranks draw different dropout masks; far apart, so that no two seeds of one run meet.
SEED_STRIDE = 1_000_003


def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    *,
    parsed: ParsedConfig,
    layers: Sequence[type[nn.Module]] | None = None,
    identity_provider: IdentityProvider | None = None,
    at_end: AtEnd | None = None,
) -> int:
    """Train as ``parsed`` says and return the exit code: 0, 1 after a failure that was printed,
    130 after an interrupt from the keyboard.

    ``train_valid_test_datasets_provider([train, valid, test])`` gets sample counts and returns
    datasets or None. ``model_provider(pre_process=True, post_process=True)`` returns the model;
    it is called on the meta device, and again for real where the model cannot fill its own weights
    (``initialise_(name, tensor, generator)``). ``forward_step(data_iterator, model)`` returns
    ``(output, loss_function)``; see ``training.reports``. ``layers``: classes of the layer
    groups, else the model's ``layer_classes``.  ``identity_provider`` gets the same counts and
    says, in JSON values by the names of ``arguments.resume.DIGESTS``, what tokenizer and data are;
    a resume compares it.  ``at_end(model)`` is called on all ranks after
    the last evaluation; its text is printed.

    A process group that exists is used and left alone; otherwise one is made from the launcher's
    variables and destroyed.
    """
    started = time.monotonic()  # --exit-duration-in-mins: waiting for the other ranks counts
    phase = Phase()
    # A caller that brings a process group goes on after a failure; else the process is ours to end.
    owns_group = not dist.is_initialized()
    several = False
    try:
        mesh = _mesh(parsed.config)
        phase.rank, several = mesh.rank, mesh.world_size > 1
        if owns_group:
            phase("joining the process group")
            minutes = parsed.config.distributed.distributed_timeout_minutes
            initialise(mesh, timeout_minutes=minutes)
        else:
            forget_cause()
        _Run(
            train_valid_test_datasets_provider,
            model_provider,
            forward_step,
            parsed=parsed,
            mesh=mesh,
            phase=phase,
            started=started,
            layers=layers,
            identities=identity_provider,
            at_end=at_end,
        )()
        code = 0
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells report it
    except Exception as error:
        level = parsed.config.logging.logging_level
        report(error, phase, debug=level is not None and level <= DEBUG_LEVEL)
        code = EXIT_FAILURE
    if owns_group:
        if code and several:
            linger(phase.rank)
            end_process(code)
        leave_group()
    return code


def _mesh(config: Config) -> Mesh:
    backend = config.distributed.distributed_backend
    device = {"gloo": "cpu", "nccl": "cuda", None: None}[backend]
    if not dist.is_initialized():
        world = mesh_from_environment(device="cpu").world_size
        layout = grid(config, world)
        return mesh_from_environment(replicas=layout.replicas, tp=layout.tp, device=device)
    world, rank, local = dist.get_world_size(), dist.get_rank(), launched_local_rank()
    layout = grid(config, world)
    cuda = "nccl" in dist.get_backend() or (torch.cuda.is_available() and device != "cpu")
    return Mesh(
        world_size=world,
        rank=rank,
        local_rank=rank if local is None else local,
        replicas=layout.replicas,
        shards=layout.shards,
        tp=layout.tp,
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        backend=dist.get_backend(),
    )


def seed_everything(config: Config, rank: int) -> None:
    """Seed Python, NumPy and torch of this place of the mesh (its tensor-parallel ranks draw
    alike), and choose the kernels that the flags ask for.

    Initial weights and data order have seeds of their own; what is left is dropout.
    """
    seed = config.training.seed + SEED_STRIDE * rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision(config.optimizer.muon_fp32_matmul_prec)
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


class _Run:
    """The parts of one call of ``pretrain``, in the order in which they are made."""

    def __init__(
        self,
        datasets: DatasetsProvider,
        model: ModelProvider,
        forward_step: ForwardStep,
        *,
        parsed: ParsedConfig,
        mesh: Mesh,
        phase: Phase,
        started: float,
        layers: Sequence[type[nn.Module]] | None,
        identities: IdentityProvider | None,
        at_end: AtEnd | None,
    ) -> None:
        self.datasets_provider = datasets
        self.model_provider = model
        self.forward_step = forward_step
        self.parsed = parsed
        self.config = parsed.config
        self.mesh = mesh
        self.phase = phase
        self.layers = layers
        self.identities = identities
        self.at_end = at_end
        self.console = Console(mesh)
        self.late: list[str] = []  # warnings that are printed below all other lines of the start
        self.watch = ExitWatch(self.config, started=started)

    def __call__(self) -> None:
        self.phase("comparing the flags of the ranks")
        check_same_flags(self.config)
        seed_everything(self.config, self.mesh.place)
        print_config(self.config, self.parsed.notes, self.console)
        set_logging_level(self.config)
        ranks = Ranks.create()
        with self.watch.armed():
            parts = self._parts(ranks)
            try:
                self._work(Loop(parts))
                self.phase("saving a checkpoint")
                parts.checkpoints.check_saved(parts.progress)
                # After a failure nothing is waited for: a peer may be gone.
                self.phase("ending the collectives under way", 0)
                parts.runtime.close()
            finally:
                parts.log.close()
        ranks.close()

    def _work(self, loop: Loop) -> None:
        training, flags = self.config.training, self.config.validation
        reason = None
        if not training.skip_train:
            reason = loop.train()
            if reason is None and loop.progress.iteration > 0:
                loop.save()
        if reason is not None:
            self.console.last(reason)
            return
        where = f"iteration {loop.progress.iteration}"
        if flags.eval_iters > 0:
            loop.validate(f"{where} on validation set")
            if not loop.requests.any:
                loop.test(f"{where} on test set")
        if loop.requests.any:
            minutes = self.watch.elapsed_minutes
            self.console.last(self.watch.reason(loop.requests, 0, minutes=minutes) or "")
            return
        if self.at_end is not None:
            self.phase("the end of the run", 0)
            text = self.at_end(loop.parts.runtime.model)
            if text is not None:
                self.console.first(text)

    def _parts(self, ranks: Ranks) -> Parts:
        config, mesh = self.config, self.mesh
        self.phase("looking for a checkpoint")
        source = find_source(config, ranks, self.late.append)
        new_order = source is not None and check_arguments(config, source, self._say)
        run = run_identity(source, ranks)
        claim_save_directory(config, source, ranks, self.late.append)
        self.phase("writing the configuration")
        write_config(config, mesh, self.late.append)
        tokenizer = keep_tokenizer(config, ranks)
        self.phase("building the model")
        runtime = self._runtime(source)
        schedule = Schedule(_schedule(config))
        checkpoints = RunCheckpoints(config, mesh, ranks, self.console, run=run)
        if source is not None:
            checkpoints.folder.update(source.documents.get(DOCUMENT) or {})
        if tokenizer:
            checkpoints.folder[TOKENIZER] = dict(tokenizer)
        progress = Progress()
        if source is not None:
            self.phase("loading a checkpoint")
            unread = config.training.skip_train
            progress = checkpoints.resume(source, runtime, None if unread else schedule)
            checkpoints.last_saved = self._already_saved(source, progress)
            progress.new_order(train=new_order, valid=new_order)
        self.phase("reading datasets")
        checkpoints.identity = self._identify(source, progress, ranks)
        datasets = self.datasets_provider(dataset_counts(config, progress))
        if mesh.rank == 0:
            for line in describe_data(datasets, checkpoints.identity):
                self.console.first(line)
        sync = torch.cuda.synchronize if mesh.device.type == "cuda" else None
        level = config.logging.timing_log_level
        timers = Timers(
            level, config.logging.timing_log_option, synchronize=sync if level else None
        )
        flops = self._flops_per_token(runtime.model)
        log = RunLog(
            config,
            mesh,
            self.console,
            timers,
            train_iterations=train_iterations(config),
            first_iteration=progress.iteration,
            flops_per_token=flops,
        )
        checkpoints.event("Starting job")
        for line in self.late:
            self.console.first(line)
        return Parts(
            config=config,
            mesh=mesh,
            console=self.console,
            phase=self.phase,
            timers=timers,
            runtime=runtime,
            schedule=schedule,
            progress=progress,
            checkpoints=checkpoints,
            watch=self.watch,
            log=log,
            datasets=datasets,
            forward_step=self.forward_step,
            flops_per_token=flops,
        )

    def _say(self, line: str) -> None:
        """A line now; a warning also below all others."""
        if line.startswith("WARNING"):
            self.late.append(line)
        else:
            self.console.first(line)

    def _identify(
        self, source: Source | None, progress: Progress, ranks: Ranks
    ) -> Mapping[str, Any]:
        """What tokenizer and data are, as rank 0 reads them; compared with the checkpoint's where
        the run goes on in them.
        """
        if self.identities is None:
            return {}
        identities, counts = self.identities, sample_counts(self.config, progress)

        def identify() -> tuple[Mapping[str, Any], str]:
            try:
                return identities(counts), ""
            except INPUT_ERRORS as error:  # building the datasets will say it on all ranks
                return {}, str(error)

        found, problem = ranks.first("identify the data", identify)
        if problem:
            self.late.append(f"WARNING: the data cannot be compared with a checkpoint's: {problem}")
        if source is None or source.weights_only or self.config.training.skip_train:
            return found
        changed = check_identity(self.config, source, found, self._say)
        progress.new_order(train="training data" in changed, valid="validation data" in changed)
        order = progress.train_order
        if not order.requests and progress.consumed_train_samples > order.start:
            self.late.append(
                f"WARNING: {source} does not say how many samples its data was put in order for:"
                " that of the present flags is taken, and is another one if the length changed"
            )
        return found

    def _already_saved(self, source: Source, progress: Progress) -> int | None:
        """A run that has nothing left to do need not write its checkpoint again."""
        save = self.config.checkpoint.save
        same = save is not None and os.path.realpath(save) == os.path.realpath(source.directory)
        return progress.iteration if same and not source.weights_only else None

    def _runtime(self, source: Source | None) -> TrainableRuntime:
        plan = source.plan_for(self.mesh) if source is not None else None
        iterated = choose_cpu_dtype(self.config, self.mesh, stored_cpu_dtype(source))
        runtime = build_runtime(
            self.model_provider,
            self.config,
            self.mesh,
            layers=self.layers,
            plan=plan,
            ns_cpu_dtype=iterated.dtype,
        )
        self.console.first(describe_grid(self.config, self.mesh))
        self.console.first(runtime.report())
        self.console.first(describe_plan(runtime.plan, reused=runtime.plan is plan))
        self.console.first(describe_optimizer(self.config, runtime))
        if iterated.line:
            self.console.first(iterated.line)
        for line in runtime.notes():
            self.console.first(line)
        return runtime

    def _flops_per_token(self, model: nn.Module) -> float | None:
        config = getattr(model, "config", None)
        if not isinstance(config, GPTConfig):
            return None  # a foreign model: throughput in tokens only
        return flops_per_token(config, self.config.model.seq_length or 1)


def _schedule(config: Config) -> ScheduleConfig:
    if config.training.skip_train:
        return ScheduleConfig(max_lr=1.0, decay_steps=1, style="constant")  # nothing will read it
    return schedule_config(config)
