"""Fuzzes the runtime: random models, used at random, against plain autograd.

Each trial is a function of its number and of the number of ranks: a model of up to 12 blocks with
ties, frozen parts, recomputation and weights used outside their modules; a line, a ZeRO stage,
replicas; and a program in which the ranks run the blocks in orders of their own, leave some out,
accumulate, evaluate, raise, and ask for gradients of inputs alone. Outputs, gradient norms and
weights must be those of ``torch`` on whole parameters, no rank may hang or die, and an ordinary
pass at the end must hold no more layers at a time than ever. A failed trial is replayed by
``--first N --trials 1``.

    python tools/fuzz_runtime.py --seconds 60 --ranks 2 --json fuzz.json

Owns the processes of the ranks and the report; ``fuzz_trials.py`` makes trials, ``fuzz_ranks.py``
runs one. The exit status is 0 only if no trial failed. Tested by
``tests/distributed/test_runtime_fuzz.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megamuon.console import run_script  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.fuzz_trials import make_trial  # noqa: E402

GRACE = 3.0  # seconds after the first failure in which other ranks may report theirs


class Ranks:
    """Processes that wait for trials; they end with the first that fails."""

    def __init__(self, ranks: int, limit: float) -> None:
        self.limit = limit
        self.folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "tools.fuzz_ranks"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            rendezvous = str(Path(self.folder.name) / "rendezvous")
            process = context.Process(
                target=_serve, args=(rank, ranks, rendezvous, limit, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, number: int) -> str:
        """Trial ``number`` on all ranks; what went wrong, or nothing."""
        for pipe in self.pipes:
            pipe.send(number)
        deadline = time.monotonic() + self.limit
        waiting, problems = list(self.pipes), []
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(waiting, timeout=left):
                waiting.remove(pipe)
                rank = self.pipes.index(pipe)
                try:
                    problem = pipe.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(timeout=5)
                    problem = f"died (exit code {self.processes[rank].exitcode})"
                if problem:
                    problems.append(f"rank {rank}: {problem}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting and not problems:
            hanging = ", ".join(str(self.pipes.index(pipe)) for pipe in waiting)
            problems.append(f"ranks {hanging} did not end within {self.limit:.0f} s")
        return "\n".join(problems)

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(timeout=10)
            pipe.close()
        self.folder.cleanup()


def _serve(rank: int, ranks: int, rendezvous: str, limit: float, pipe: Connection) -> None:
    """Body of one rank: a trial's number comes, its problem goes back ("" for none)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    import torch
    import torch.distributed as dist

    from tools.fuzz_ranks import run_trial

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=limit),
    )
    while True:
        number = pipe.recv()
        over = threading.Event()
        threading.Thread(target=_say_where, args=(over, limit - 1.0), daemon=True).start()
        try:
            run_trial(make_trial(number, ranks), rank)
            dist.barrier()
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            pipe.send(f"{type(error).__name__}: {error} ({place})")
            os._exit(1)  # destructors of groups may wait for peers that never come
        over.set()
        pipe.send("")


def _say_where(over: threading.Event, seconds: float) -> None:
    """The main thread's stack on stderr, shortly before the parent ends a rank that hangs."""
    if not over.wait(seconds):
        main = threading.main_thread().ident
        frames = sys._current_frames()
        if main in frames:
            sys.stderr.write("".join(traceback.format_stack(frames[main])))
            sys.stderr.flush()


def run_fuzz(
    *, ranks: int, first: int, trials: int | None, seconds: float | None, limit: float, say: Any
) -> dict[str, Any]:
    """Run trials from number ``first`` on, ``trials`` of them or for ``seconds``; the report."""
    started, done, failures = time.monotonic(), 0, 0
    first_failure: dict[str, Any] | None = None
    pool: Ranks | None = None
    try:
        while (trials is None or done < trials) and (
            seconds is None or time.monotonic() - started < seconds
        ):
            pool = pool or Ranks(ranks, limit)
            problem = pool.run(first + done)
            done += 1
            if problem:
                failures += 1
                trial = str(make_trial(first + done - 1, ranks))
                say(f"{trial}\n{problem}")
                if first_failure is None:
                    first_failure = {
                        "trial": first + done - 1,
                        "program": trial,
                        "problem": problem,
                    }
                pool.end()
                pool = None
    finally:
        if pool is not None:
            pool.end()
    return {
        "ranks": ranks,
        "first": first,
        "trials": done,
        "failures": failures,
        "first_failure": first_failure,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, 1 to 8")
    parser.add_argument("--seconds", type=float, help="how long to go on")
    parser.add_argument("--trials", type=int, help="how many trials to run")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds until a trial hangs")
    add_json_flag(parser, __file__)
    options = parser.parse_args()
    if options.seconds is None and options.trials is None:
        options.seconds = 60.0
    if not 1 <= options.ranks <= 8:
        parser.error(f"--ranks {options.ranks}: choose 1 to 8")
    report = run_fuzz(
        ranks=options.ranks,
        first=options.first,
        trials=options.trials,
        seconds=options.seconds,
        limit=options.limit,
        say=lambda text: print(text, flush=True),
    )
    print(f"{report['trials']} trials, {report['failures']} failures in {report['seconds']} s")
    write_json(options.json, __file__, report)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
