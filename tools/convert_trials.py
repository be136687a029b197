"""Trials of the conversion: a random model there and back, and a large folder in little memory.

Owns the figures of ``convert_checkpoint.py --self-test`` and ``--bench``. Invariant: a round trip
is compared with the folder that ``transformers`` wrote, tensor by tensor, and memory is that of a
process that does nothing but convert. Tested by ``tests/tools/test_convert_checkpoint.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megamuon.arguments import config_from_values
from megamuon.checkpoint.storage import file_blocks
from megamuon.conversion import FAMILIES, config_from_flags, flags_from_config, read_config
from megamuon.conversion.hf_index import folder_index, part_view, spelled
from megamuon.conversion.tensor_file import Reader, read_header
from megamuon.models import GPT, PRESETS, gpt_config_from_flags
from tools.hf_folders import write_folder

TOLERANCE = 1e-5
ALLOWANCE = 300 << 20  # bytes beside two of the largest tensor: the interpreter and its libraries
SHAPES = {"7b": "qwen2.5-7b", "0.5b": "qwen2.5-0.5b"}
TOOL = Path(__file__).with_name("convert_checkpoint.py")


def folder_contents(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(read_header(path))
            found.update({key: file.get_tensor(key) for key in names})
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both have the same names, shapes, dtypes and bytes."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8))
        for key in one
    )


def our_model(folder: Path) -> GPT:
    """Our model of a Hugging Face folder, with its weights, in evaluation."""
    config = read_config(folder)
    values = flags_from_config(config, folder)
    flags, rows = config_from_values(values), values["padded_vocab_size"]
    model = GPT(
        gpt_config_from_flags(flags.model, padded_vocab_size=rows, recompute=flags.recompute)
    )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    index = folder_index(folder, FAMILIES[config["model_type"]], shapes).index
    reader = Reader(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.tensor(index[name]))
    return model.eval()


def differences(theirs: nn.Module, ours: GPT, family: str) -> tuple[float, float]:
    """Largest difference of the logits and of any gradient of the mean loss."""
    rows = ours.config.vocab_size
    ids = torch.randint(0, rows, (2, 24), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1, 1)
    expected, mine = theirs(ids).logits, ours(ids)
    logits = (mine - expected).abs().max().item()
    loss = nn.functional.cross_entropy
    loss(expected.flatten(0, 1), labels.flatten()).backward()
    loss(mine.flatten(0, 1), labels.flatten()).backward()
    reference = {name: p.grad for name, p in theirs.named_parameters()}
    worst = 0.0
    for name, parameter in ours.named_parameters():
        names = FAMILIES[family].names
        found = [spelled(name, spelling) for spelling in names]
        theirs_name, rule, expert = next(entry for entry in found if entry[0] in reference)
        whole = reference[theirs_name]
        view = part_view(rule, expert, tuple(parameter.shape))
        part = whole if view is None else view.inside(whole, parameter.shape[0])
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        worst = max(worst, (grad - part).abs().max().item())
    return logits, worst


def self_test(family: str) -> dict[str, Any]:
    """A folder by ``transformers``, to ours and back, by the tool's own command line."""
    with tempfile.TemporaryDirectory() as scratch:
        first, ours, second = (Path(scratch) / name for name in ("first", "ours", "second"))
        theirs = write_folder(first, family, old=True, sharded=True)
        _converted("hf", first, "megamuon", ours)
        _converted("megamuon", ours, "hf", second)
        equal = same_bits(folder_contents(first), folder_contents(second))
        logits, gradients = differences(theirs, our_model(second), family)
    return {
        "bitwise_round_trip": equal,
        "max_logit_difference": logits,
        "max_gradient_difference": gradients,
        "passed": equal and max(logits, gradients) <= TOLERANCE,
    }


def _converted(source: str, folder: Path, target: str, output: Path) -> tuple[float, int]:
    """Run the tool; seconds, and the most memory that it held, in bytes."""
    words = ["--from", source, "--input", str(folder), "--to", target, "--output", str(output)]
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(TOOL), *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(f"the conversion of {folder} ended with {process.returncode}")
    return time.monotonic() - started, usage.ru_maxrss * 1024


def bench(shape: str) -> dict[str, Any]:
    """Convert a BF16 folder of the preset's shape both ways."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        first, ours, second = (Path(scratch) / name for name in ("first", "ours", "second"))
        size, largest = _synthetic(first, SHAPES[shape])
        if (free := shutil.disk_usage(scratch).free) < 2.1 * size:
            raise ValueError(f"{scratch}: {free / 1e9:.0f} GB free, {2.1 * size / 1e9:.0f} needed")
        seconds, peak = _converted("hf", first, "megamuon", ours)
        shutil.rmtree(first)
        more, other = _converted("megamuon", ours, "hf", second)
    allowed = 2 * largest + ALLOWANCE
    return {
        "gigabytes": size / 1e9,
        "largest_tensor_mib": largest / 2**20,
        "peak_mib": {"to_megamuon": peak / 2**20, "to_hf": other / 2**20},
        "allowed_mib": allowed / 2**20,
        "peak_over_largest_tensor": max(peak, other) / largest,
        "seconds": {"to_megamuon": seconds, "to_hf": more},
        "passed": max(peak, other) <= allowed,
    }


def _synthetic(folder: Path, preset: str) -> tuple[int, int]:
    """A folder with the preset's shapes in BF16; bytes in all and of the largest tensor."""
    values = {"vocab_size": None, **PRESETS[preset]}
    rows = values.pop("vocab_size") or 320
    flags = config_from_values(values)
    with torch.device("meta"):
        model = GPT(
            gpt_config_from_flags(flags.model, padded_vocab_size=rows, recompute=flags.recompute)
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    described = {**vars(flags.model), "padded_vocab_size": rows}
    folder.mkdir()
    config = config_from_flags(described, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    entries = [(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    sizes = [2 * torch.Size(shape).numel() for shape in shapes.values()]

    def tensors() -> Iterator[Tensor]:
        for shape in shapes.values():
            yield torch.full(shape, 0.02, dtype=torch.bfloat16)

    with (folder / "model.safetensors").open("wb") as file:
        for block in file_blocks(entries, tensors()):
            file.write(block)
    return sum(sizes), max(sizes)
