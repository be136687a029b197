"""The examples run as they stand, and their flags are ours."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

import megamuon
from megamuon.arguments import ConfigError, ParsedConfig, parse_config
from megamuon.models.presets import PRESETS
from megamuon.training.builders import grid

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "huggingface" / "pretrain_qwen2.py"
ENTRY = str(ROOT / "pretrain_gpt.py")
SCRIPTS = sorted(ROOT.glob("examples/*/*.sh"))
SLURM = [path for path in SCRIPTS if path.name.startswith("slurm_")]
HSDP = [path for path in SCRIPTS if "--sharding hsdp" in path.read_text(encoding="utf-8")]
GPUS = 8  # of a node
STEPS = 21

# Stand-ins for programs of a cluster. torchrun writes its words down, sbatch runs the job at once.
STUBS = {
    "torchrun": 'printf \'%s\\0\' "$@" > "$WORDS"',
    "sbatch": 'printf "%s\\n" "$@" >> "$WORDS.sbatch"; printf "\\n" >> "$WORDS.sbatch"\n'
    "SLURM_JOB_NODELIST='n[0-1]' SLURM_JOB_ID=7 exec bash",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "printf 'first\\nsecond\\n'",
}


# --- package ---


def test_importing_the_package_brings_no_torch() -> None:
    code = "import sys, megamuon; assert megamuon.__version__; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "False"


def test_every_public_name_exists_and_others_do_not() -> None:
    for name in megamuon.__all__:
        assert getattr(megamuon, name) is not None
        assert name in dir(megamuon)
    assert megamuon.shard is importlib.import_module("megamuon.runtime").shard
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        _ = megamuon.shards


# --- the Hugging Face example ---


def run_example(ranks: int, *flags: str) -> str:
    """Standard output; raises with the output of a failed run."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLE), "--steps", str(STEPS), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(output: str) -> list[float]:
    return [
        float(value) for value in re.findall(r"^step +\d+ +loss ([\d.]+)", output, re.MULTILINE)
    ]


def norms_of(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"norm ([\d.]+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Output and folder of each run: one rank and two (one replica, two replicas), tied and
    untied head.
    """
    folder = tmp_path_factory.mktemp("huggingface")
    config = folder / "untied.json"
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config.write_text(json.dumps({**sizes, **heads, "tie_word_embeddings": False}))
    untied = ("--model-config", str(config))
    cases: dict[str, tuple[int, tuple[str, ...]]] = {
        "tied-1": (1, ()),
        "tied-2": (2, ("--recompute",)),
        "untied-1": (1, (*untied, "--zero-stage", "2")),
        "untied-2": (2, (*untied, "--rows", "2")),
    }

    def one(name: str) -> tuple[str, Path]:
        ranks, flags = cases[name]
        return run_example(ranks, *flags, "--output", str(folder / name)), folder / name

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(one, cases), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_example_learns_alike_on_one_rank_and_on_two(
    runs: dict[str, tuple[str, Path]], kind: str
) -> None:
    one, two = (losses_of(runs[f"{kind}-{ranks}"][0]) for ranks in (1, 2))
    assert len(one) == len(two) == 3
    assert one[-1] < one[0] - 2.0
    assert one == pytest.approx(two, abs=1e-3)


@pytest.mark.slow
def test_the_example_saves_what_it_trained(runs: dict[str, tuple[str, Path]]) -> None:
    from safetensors.torch import load_file

    for name, (output, folder) in runs.items():
        assert f"saved to {folder}: reloading it gives the same logits" in output
        saved = load_file(folder / "model.safetensors")
        assert ("lm_head.weight" in saved) == name.startswith("untied")
        tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert tied == name.startswith("tied")
    for kind in ("tied", "untied"):
        one, two = (load_file(runs[f"{kind}-{n}"][1] / "model.safetensors") for n in (1, 2))
        assert one.keys() == two.keys()
        for key, value in one.items():
            torch.testing.assert_close(value, two[key], atol=2e-3, rtol=0)


@pytest.mark.slow
def test_the_routes_of_the_example(runs: dict[str, tuple[str, Path]]) -> None:
    assert "1 x chosen by the route function (e.g. lm_head.weight" in runs["untied-1"][0]
    assert "chosen by the route function" not in runs["tied-1"][0]
    assert re.search(r"matrix +21 parameters", runs["tied-2"][0])  # q k v o gate up down, 3 layers
    assert re.search(r"matrix +14 parameters", runs["untied-2"][0])


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_qwen2_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_first_step_has_the_gradients_of_the_plain_model(
    runs: dict[str, tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name])
    example = load_example()
    arguments: argparse.Namespace = example.parse_arguments()
    torch.manual_seed(arguments.seed)
    model = example.Qwen2ForCausalLM(example.model_config(arguments))
    whole = example.mesh_from_environment(environment={}, device="cpu")
    batch = example.local_batch(example.read_tokens(None), 0, arguments, whole)
    model(input_ids=batch, labels=batch).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for name in ("tied-1", "tied-2"):
        assert norms_of(runs[name][0])[0] == pytest.approx(float(norm), abs=2e-4)


# --- scripts of the other examples ---


def start_script(
    script: Path, folder: Path, *more: str, variables: Mapping[str, str] | None = None
) -> list[str]:
    """Run a script with the stand-ins first on PATH; returns the words that torchrun got."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (stubs / name).chmod(0o755)
    words = folder / "words"
    names = {"MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "PARTITION", "ACCOUNT"}
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {"PATH": f"{stubs}:{os.environ['PATH']}", "WORDS": str(words)}
    paths = [str(folder / "saved here"), str(folder / "board"), "a tokenizer", "data/c_document"]
    done = subprocess.run(
        ["bash", str(script), *paths, *more],
        env={**environment, **(variables or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return words.read_text(encoding="utf-8").split("\0")[:-1]


def flags_of(words: Sequence[str]) -> list[str]:
    return list(words[words.index(ENTRY) + 1 :])


def nodes_of(words: Sequence[str]) -> int:
    return int(words[words.index("--nnodes") + 1])


def parse(words: Sequence[str], nodes: int | None = None) -> ParsedConfig:
    """As ``pretrain_gpt.py`` reads them on so many nodes, or on those that torchrun was told."""
    world = (nodes or nodes_of(words)) * GPUS
    return parse_config(flags_of(words), presets=PRESETS, world_size=world, local_world_size=GPUS)


def name_of(path: Path) -> str:
    return path.name


def test_there_is_a_script_for_each_model() -> None:
    folders = {"qwen2.5", "qwen1.5-moe", "qwen3", "qwen3-moe", "llama3", "gpt2"}
    assert {path.parent.name for path in SCRIPTS} == folders
    for folder in (ROOT / "examples").iterdir():
        assert not folder.is_dir() or (folder / "README.md").exists(), folder


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_scripts_are_bash_and_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o100
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_every_flag_of_a_script_is_accepted(script: Path, tmp_path: Path) -> None:
    words = start_script(script, tmp_path)
    parsed = parse(words)
    assert not parsed.notes  # nothing accepted without effect, nothing twice
    assert not parse(words, nodes=2).notes
    config = parsed.config
    assert config.optimizer.optimizer == "muon"
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / "saved here")
    assert config.tokenizer.tokenizer_model == "a tokenizer"  # blanks survive the quoting
    assert config.data.data_path == ("data/c_document",)
    assert config.logging.tensorboard_dir == str(tmp_path / "board")
    assert words[words.index("--nproc-per-node") + 1] == str(GPUS)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_flags_at_the_end_win(script: Path, tmp_path: Path) -> None:
    words = start_script(script, tmp_path, "--train-iters", "7", "--eod-token", "<end of text>")
    config = parse(words).config
    assert config.training.train_iters == 7
    assert config.tokenizer.eod_token == "<end of text>"


def test_a_wrong_flag_would_be_caught(tmp_path: Path) -> None:
    words = start_script(SCRIPTS[0], tmp_path, "--zero-stages", "3")
    with pytest.raises(ConfigError, match="--zero-stage"):
        parse(words)


@pytest.mark.parametrize("script", HSDP, ids=name_of)
def test_a_row_of_the_hsdp_scripts_is_a_node(script: Path, tmp_path: Path) -> None:
    words = start_script(script, tmp_path)
    for nodes in (1, 2, nodes_of(words)):
        config = parse(words, nodes).config
        laid = grid(config, nodes * GPUS)
        assert (laid.replicas, laid.shards * laid.tp) == (nodes, GPUS)


def test_the_scripts_show_experts_and_tensor_parallelism(tmp_path: Path) -> None:
    assert set(SLURM) <= set(HSDP)
    for script in SCRIPTS:
        config = parse(start_script(script, tmp_path)).config
        assert (config.model.num_experts is not None) == script.parent.name.endswith("-moe")
        flags = config.parallel
        assert flags.sequence_parallel == (flags.tensor_model_parallel_size > 1)
        assert flags.sequence_parallel == (script.name == "slurm_qwen2.5_32b.sh")


@pytest.mark.parametrize(
    ("name", "preset", "differs"),
    [("llama3", "llama3-8b", set()), ("gpt2", "gpt2", {"hidden_dropout", "attention_dropout"})],
)
def test_spelled_out_architectures_are_the_presets(
    name: str, preset: str, differs: set[str], tmp_path: Path
) -> None:
    (script,) = ROOT.glob(f"examples/{name}/*.sh")
    words = start_script(script, tmp_path)
    config = parse(words).config
    padding = {"vocab_size", "make_vocab_size_divisible_by"}  # here the tokenizer decides
    for key, value in PRESETS[preset].items():
        if key not in padding | differs:
            assert getattr(config.model, key) == value, key


def test_a_script_without_its_four_paths_says_so() -> None:
    for script in SCRIPTS:
        done = subprocess.run(["bash", str(script), "one"], capture_output=True, text=True)
        assert done.returncode == 2
        assert "CHECKPOINTS TENSORBOARD TOKENIZER DATA" in done.stderr


@pytest.mark.parametrize("script", SLURM, ids=name_of)
def test_slurm_jobs_form_a_chain_and_leave_before_their_wall_time(
    script: Path, tmp_path: Path
) -> None:
    variables = {"JOBS": "2", "WALL_MINUTES": "90", "PARTITION": "gpu", "CONTAINER": "an image"}
    words = start_script(script, tmp_path, variables={**variables, "NODES": "2"})
    assert words[: words.index(ENTRY)] == [
        *("--nnodes", "2", "--nproc-per-node", str(GPUS)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", "first:6000"),
    ]
    submitted = (tmp_path / "words.sbatch").read_text().split("\n\n")[:-1]
    assert len(submitted) == 2
    assert submitted[0] == submitted[1]  # one name, so that singleton chains them
    given = submitted[0].split("\n")
    assert given[given.index("--dependency") + 1] == "singleton"
    assert given[given.index("--partition") + 1] == "gpu"
    assert given[given.index("--nodes") + 1] == "2"
    assert given[given.index("--ntasks-per-node") + 1] == "1"
    wall = int(given[given.index("--time") + 1])
    assert wall == 90
    assert parse(words).config.training.exit_duration_in_mins == 75


def test_a_wall_time_without_room_to_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="WALL_MINUTES=15: more than 15 are needed"):
        start_script(SLURM[0], tmp_path, variables={"WALL_MINUTES": "15"})
