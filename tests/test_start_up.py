"""What a command imports before it knows what it has to do: torch, and nothing else that is slow.

By names of modules, never by time. What ``import torch`` brings by itself differs between its
versions and does not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    "pretrain_gpt.py",
    "tools/preprocess_data.py",
    "tools/plan_owners.py",
    "tools/generate.py",
]

# Each takes tenths of a second or more. Whoever uses one imports it where it is used.
SLOW = {
    "matplotlib",
    "sentencepiece",
    "sympy",
    "tensorboard",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
    "wandb",
}

# Runs scripts with --help, one after another in this process, which has torch: {script: what it
# has added to sys.modules}.
HELP = """
import contextlib, io, json, runpy, sys
import torch
added = {}
for script in sys.argv[1:]:
    before, said, sys.argv = set(sys.modules), io.StringIO(), [script, "--help"]
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (script, end)
    assert "usage:" in said.getvalue(), script
    added[script] = sorted(set(sys.modules) - before)
print(json.dumps(added))
"""


def test_help_imports_nothing_slow() -> None:
    command = [sys.executable, "-c", HELP, *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout.splitlines()[-1])
    assert "megamuon.training.pretrain" in added["pretrain_gpt.py"]
    assert {script: SLOW.intersection(names) for script, names in added.items()} == {
        script: set() for script in COMMANDS
    }


def test_the_slow_ones_are_known_by_their_names() -> None:
    """The names above are those under which the package's own late imports load them."""
    code = (
        "import sys, megamuon.checkpoint.torch_store, megamuon.baselines.fully_sharded\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {"sympy", *(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp"))}
    assert expected <= set(done.stdout.split())
