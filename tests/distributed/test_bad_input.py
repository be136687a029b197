"""Bad input through the real command line: one clear line, a non-zero exit, nothing lost.

The launches of a test run side by side, because most of their time is start-up. Ranks that differ
are started by hand, as a launcher would start them, with other flags on each.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.training import ROOT, flags

Words = Sequence[object]
QUIET = ("Traceback", "frame #", ".cc:")  # neither a stack of ours nor one of the backend
SECONDS = 60.0


def start(words: Words, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if world > 1:
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *(str(word) for word in words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True)


def pretraining(**changes: object) -> list[object]:
    return [ROOT / "pretrain_gpt.py", *flags(eval_iters=0, split="1,0,0", **changes)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error; killed, and -9, after a minute."""
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
    return process.returncode, errors


def by_hand(*words_of_rank: Words) -> list[tuple[int, str]]:
    port, world = free_port(), len(words_of_rank)
    ranks = [start(words, rank, world, port) for rank, words in enumerate(words_of_rank)]
    return [ended(process) for process in ranks]


def preprocess(*words: object) -> list[object]:
    return [ROOT / "tools" / "preprocess_data.py", "--tokenizer-type", "byte", *words]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": f"document {n}: " + "the quick brown fox " * 9}) for n in range(9)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    words = ("--input", folder / "text.jsonl", "--output-prefix", folder / "good", "--workers", 1)
    assert ended(start(preprocess(*words, "--append-eod"))) == (0, "")
    return folder / "good_text_document"


def copy_of(corpus: Path, name: str) -> Path:
    copy = corpus.with_name(name)
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus.with_suffix(suffix), copy.with_suffix(suffix))
    return copy


def bad_data(corpus: Path) -> Iterator[tuple[list[object], str]]:
    truncated, foreign, short = (copy_of(corpus, n) for n in ("truncated", "foreign", "short"))
    os.truncate(truncated.with_suffix(".idx"), 100)
    yield pretraining(data_path=truncated), "truncated.idx: file size: 100 bytes, but the header"
    foreign.with_suffix(".idx").write_bytes(b"PK\x03\x04" + bytes(900))
    yield pretraining(data_path=foreign), "foreign.idx: magic: "
    os.truncate(short.with_suffix(".bin"), 40)
    yield pretraining(data_path=short), "short.bin: file size: 40 bytes, but short.idx describes"
    small = {"tokenizer_type": "NullTokenizer", "vocab_size": 40, "data_path": corpus}
    yield pretraining(**small), "good_text_document.bin: token id 1"
    blank, empty = corpus.with_name("blank.jsonl"), corpus.with_name("empty")
    blank.write_text("\n\n")
    empty.mkdir()
    output = ("--output-prefix", corpus.with_name("never"))
    yield preprocess("--input", blank, *output), "empty corpus, no text"
    yield preprocess("--input", empty, *output), "empty corpus, no files"


def test_bad_data_is_one_line_each(corpus: Path) -> None:
    cases = list(bad_data(corpus))
    running = [start(words) for words, _ in cases]
    for process, (_, expected) in zip(running, cases, strict=True):
        code, errors = ended(process)
        assert code == 1, errors
        (line,) = errors.splitlines()
        assert "error: " in line and expected in line.replace(f"{corpus.parent}/", "")
    assert not list(corpus.parent.glob("never*"))  # no half-written dataset is left


def test_a_launcher_shows_our_lines_above_its_own(corpus: Path, tmp_path: Path) -> None:
    """Two ranks under torchrun: contradictions, a cut checkpoint; the one before still loads."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run = {"data_path": corpus, "save": tmp_path, "save_interval": 2, "train_iters": 4}
    run["global_batch_size"] = 4  # the schedule counts samples: the same at any world size
    assert ended(start(launcher + pretraining(**run)))[0] == 0
    wrong = pretraining(**run, train_samples=8, zero_stage=5, lr_decay_stile="linear")
    cut = next((tmp_path / "iter_0000004").glob("rank_00001*"))
    cut.rename(tmp_path.with_name("put-aside"))
    more = {**run, "load": tmp_path}
    processes = [start(launcher + wrong), start(launcher + pretraining(**more))]
    flag_code, flag_errors = ended(processes[0])
    code, errors = ended(processes[1])
    assert flag_code == 1 and code == 1  # the launcher's own code, whatever ours was
    ours = [line for line in flag_errors.splitlines() if "error: --" in line]
    assert flag_errors.splitlines()[: len(ours)] == ours and len(ours) == 3
    assert any("--lr-decay-stile" in line and "--lr-decay-style?" in line for line in ours)
    first = errors.splitlines()[0]
    assert first.startswith("error: ") and f"{cut} is missing" in first
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    code, errors = ended(start(pretraining(**more, ckpt_step=2)))
    assert code == 0, errors


def times(path: Path, milliseconds: Sequence[float]) -> Path:
    shapes = [(30, 50), (50, 60), (50, 87), (60, 50), (87, 50)]  # nano's matrices
    path.write_text(json.dumps(list(zip(shapes, milliseconds, strict=True))))
    return path


def differing(tmp_path: Path) -> Iterator[tuple[list[Words], str]]:
    both = [pretraining(), pretraining()]
    yield (
        [both[0] + ["--owner-planner", "lpt"], both[1] + ["--owner-planner", "round_robin"]],
        "--owner-planner is 'lpt' on rank 0 and 'round_robin' on rank 1",
    )
    yield (
        [both[0], both[1] + ["--lr", "0.5", "--train-iters", "3"]],
        "--train-iters is 6 on rank 0 and 3 on rank 1; --lr is 0.01 on rank 0 and 0.5 on rank 1",
    )

    yield (
        [both[0], both[1] + ["--load", str(tmp_path), "--sample-prompt", "x"]],
        "--sample-prompt is None on rank 0 and 'x' on rank 1;"
        " --load is 'not given' on rank 0 and 'given' on rank 1",
    )


def test_ranks_whose_flags_or_plans_differ_say_how(tmp_path: Path) -> None:
    began = time.monotonic()
    for words, expected in differing(tmp_path):
        results = by_hand(*words)
        errors = "".join(text for _, text in results)
        assert [code for code, _ in results] == [1, 1], errors
        (line,) = errors.splitlines()
        assert line.startswith("error: the ") and expected in line
    assert time.monotonic() - began < SECONDS


def test_a_bad_command_line_on_one_rank_alone_is_heard() -> None:
    port = free_port()
    first = start(pretraining(), 0, 2, port)
    try:
        code, errors = ended(start(pretraining(zero_stage=7), 1, 2, port))
    finally:
        first.kill()
        first.communicate()
    assert code == 2
    assert errors.splitlines() == ["rank 1: error: --zero-stage 7: must be one of 1, 2, 3"]
