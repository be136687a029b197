"""Speed of the datasets beside plain NumPy and C++ that do what Megatron-LM does.

Owns the comparison: blend indices, the build of sample indices, the load of cached ones, and
items. The references are written out here and in ``data_reference.cpp``: one loop per draw and per
sample, NumPy's shuffle, arrays saved and mapped without a hash, masks and positions made once and
handed out again. Invariants: ours and the reference take turns on one corpus, their results are
equal, and ratios are of medians of processor seconds (``--clock wall``: of the wall). Tested by
``tests/tools/test_data_room_bench.py``.

Example: ``python tools/bench/data_room.py --json data_room.json``
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from megamuon.data import native  # noqa: E402
from megamuon.data.blend import blend_indices  # noqa: E402
from megamuon.data.build import DataSpec, build_train_valid_test  # noqa: E402
from megamuon.data.gpt_dataset import GPTDataset  # noqa: E402
from megamuon.data.indexed import IndexedDataset, bin_path, idx_path  # noqa: E402
from megamuon.data.indexed_format import CODES, HEADER, MAGIC, VERSION  # noqa: E402
from tools.bench.common import machine_facts, warn_if_busy  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

VOCABULARY = 32_000
SEED = 1234
Clock = Callable[[], float]


def reference_library(folder: Path) -> ctypes.CDLL:
    """``data_reference.cpp``, built into ``folder``. Raises RuntimeError without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("there is no g++ to build data_reference.cpp with")
    source = Path(__file__).with_name("data_reference.cpp")
    made = folder / "reference.so"
    command = [compiler, "-std=c++17", "-O3", "-fPIC", "-shared", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def address(array: Any) -> ctypes.c_void_p:
    """Where an array's elements are."""
    return ctypes.c_void_p(array.ctypes.data)


def turns(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int, clock: Clock) -> Any:
    """Median seconds of both, taken in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for work, taken in zip((ours, theirs), seconds, strict=True):
            start = clock()
            work()
            taken.append(clock() - start)
    mine, other = (statistics.median(taken) for taken in seconds)
    return {"seconds": mine, "reference_seconds": other, "ratio": mine / max(other, 1e-9)}


def write_corpus(prefix: Path, documents: int, mean: int) -> None:
    """Documents of exponential lengths around ``mean``, written as arrays."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(1, generator.exponential(mean, documents)).astype("<i4")
    items = generator.integers(1, VOCABULARY, lengths.sum(dtype=np.int64), dtype=np.uint16)
    items.tofile(bin_path(prefix))
    ends = np.cumsum(lengths, dtype="<i8")
    pointers = np.concatenate(([0], ends[:-1])).astype("<i8") * 2
    with idx_path(prefix).open("wb") as file:
        code = CODES[np.dtype("<u2")]
        file.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        for part in (lengths, pointers, np.arange(documents + 1, dtype="<i8")):
            file.write(part.tobytes())


class Reference:
    """One dataset as Megatron-LM makes it: three arrays, saved, mapped and read from."""

    NAMES = ("document_index", "sample_index", "shuffle_index")

    def __init__(self, library: ctypes.CDLL, prefix: Path, length: int, folder: Path) -> None:
        self.library, self.prefix, self.length, self.folder = library, prefix, length, folder
        self.masks: tuple[torch.Tensor, torch.Tensor] | None = None

    def open(self) -> None:
        """Map the index and the items; nothing is checked."""
        index = np.memmap(idx_path(self.prefix), mode="r")
        count = int(np.frombuffer(index, "<u8", 1, 18)[0])
        self.lengths = np.frombuffer(index, "<i4", count, 34)
        self.pointers = np.frombuffer(index, "<i8", count, 34 + 4 * count)
        self.items = memoryview(np.memmap(bin_path(self.prefix), mode="r"))

    def build(self, samples: int) -> None:
        """Make the arrays and save them."""
        self.open()
        tokens = int(self.lengths.sum(dtype=np.int64))
        epochs = max(1, -(-(samples * self.length + 1) // tokens))
        total = (epochs * tokens - 1) // self.length
        before = ((epochs - 1) * tokens - 1) // self.length
        apart = epochs > 1 and samples - before < int(0.8 * ((tokens - 1) // self.length))
        random = np.random.RandomState(SEED)
        documents = np.tile(np.arange(self.lengths.size, dtype=np.int32), epochs)
        cut = (epochs - 1) * self.lengths.size if apart else documents.size
        random.shuffle(documents[:cut])
        random.shuffle(documents[cut:])
        rows = np.empty((total + 1, 2), dtype=np.int32)
        self.library.reference_samples(
            address(self.lengths),
            address(documents),
            ctypes.c_int64(self.length),
            ctypes.c_int64(total),
            address(rows),
        )
        order = np.arange(total, dtype=np.uint32)
        cut = before if apart else total
        random.shuffle(order[:cut])
        random.shuffle(order[cut:])
        self.folder.mkdir(exist_ok=True)
        for name, array in zip(self.NAMES, (documents, rows, order), strict=True):
            np.save(self.folder / name, array)

    def load(self) -> None:
        """Map the saved arrays."""
        self.open()
        self.documents, self.rows, self.order = (
            np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in self.NAMES
        )

    def item(self, number: int) -> dict[str, torch.Tensor]:
        """Tokens, labels, mask and positions of a sample."""
        row = int(self.order[number])
        (first, start), (last, stop) = self.rows[row], self.rows[row + 1]
        parts = []
        for place in range(first, last + 1):
            document = self.documents[place]
            offset = start if place == first else 0
            end = stop + 1 if place == last else self.lengths[document]
            at = int(self.pointers[document]) + 2 * int(offset)
            parts.append(np.frombuffer(self.items, np.uint16, int(end) - int(offset), at))
        text = torch.from_numpy(np.concatenate(parts).astype(np.int64)).long()
        tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        if self.masks is None:
            self.masks = (torch.ones(self.length), torch.arange(self.length))
        mask, positions = self.masks
        mask[labels == -1] = 0.0
        tokens[tokens == -1] = 0
        labels[labels == -1] = 0
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


def bench_blend(library: ctypes.CDLL, draws: int, parts: int, repeats: int, clock: Clock) -> Any:
    """Indices of a weighted blend; raises RuntimeError unless they are equal."""
    weights = np.random.default_rng(parts).random(parts)
    weights /= weights.sum()
    datasets, samples = np.empty(draws, np.int16), np.empty(draws, np.int64)
    drawn = np.empty(parts, np.int64)

    def theirs() -> None:
        nonlocal datasets, samples  # fresh memory each time, as ours is
        datasets, samples = np.empty(draws, np.int16), np.empty(draws, np.int64)
        library.reference_blend(
            address(weights),
            ctypes.c_int64(parts),
            ctypes.c_int64(draws),
            address(datasets),
            address(samples),
            address(drawn),
        )

    def ours() -> Any:
        return blend_indices(weights.tolist(), draws)

    found = turns(ours, theirs, repeats, clock)
    mine = ours()
    if not (np.array_equal(mine[0], datasets) and np.array_equal(mine[1], samples)):
        raise RuntimeError("the blends differ")
    return found


def bench_dataset(options: argparse.Namespace, library: ctypes.CDLL, folder: Path) -> Any:
    """Build, cached load and items of one corpus; raises RuntimeError unless items are equal."""
    prefix, cache = folder / "corpus", folder / "cache"
    write_corpus(prefix, options.documents, options.mean_length)
    clock = CLOCKS[options.clock]
    tokens = bin_path(prefix).stat().st_size // 2
    samples = int(options.epochs * tokens / options.length)
    spec = DataSpec(
        sequence_length=options.length,
        samples=(samples, 0, 0),
        seed=SEED,
        eod=0,
        vocab_size=VOCABULARY,
        train_data_path=[str(prefix)],
        data_cache_path=str(cache),
    )
    reference = Reference(library, prefix, options.length, folder / "reference")

    def ours() -> GPTDataset:
        made = build_train_valid_test(spec)[0]
        assert isinstance(made, GPTDataset)
        return made

    def build() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        ours()

    result = {"build": turns(build, lambda: reference.build(samples), options.repeats, clock)}
    result["cached_load"] = turns(ours, reference.load, options.repeats, clock)
    dataset = ours()
    numbers = np.random.default_rng(1).integers(0, samples, options.items).tolist()
    for number in numbers[:50]:
        mine, other = dataset[number], reference.item(number)
        if any(not torch.equal(mine[name], other[name]) for name in other):
            raise RuntimeError(f"item {number} differs")

    def read(get: Callable[[int], Any]) -> None:
        for number in numbers:
            get(number)

    result["items"] = turns(
        lambda: read(dataset.__getitem__), lambda: read(reference.item), options.repeats, clock
    )
    opened = turns(lambda: IndexedDataset(prefix), reference.open, options.repeats, clock)
    return result | {"open": opened, "samples": samples, "tokens": tokens}


CLOCKS: dict[str, Clock] = {"cpu": time.process_time, "wall": time.perf_counter}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the figures; exit code 1 where a result differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10_000_000, help="draws of a blend")
    parser.add_argument("--parts", type=int, default=12, help="parts of the blend")
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents of the corpus")
    parser.add_argument("--mean-length", type=int, default=400, help="tokens of a document")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--epochs", type=float, default=2.5, help="epochs that samples ask for")
    parser.add_argument("--items", type=int, default=2_000, help="items that are read")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each measurement")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="which seconds")
    add_json_flag(parser, __file__)
    options = parser.parse_args(arguments)
    warn_if_busy()
    if native.library() is None:
        print(f"data_room: the host library is absent; {native.REMEDY}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            library = reference_library(folder)
            clock = CLOCKS[options.clock]
            figures = {"blend": bench_blend(library, options.draws, options.parts, 3, clock)}
            figures |= bench_dataset(options, library, folder)
        except RuntimeError as error:
            print(f"data_room: {error}", file=sys.stderr)
            return 1
    for name in ("blend", "build", "open", "cached_load", "items"):
        part = figures[name]
        print(
            f"{name:12} {part['seconds']:10.4f} s, reference {part['reference_seconds']:10.4f} s, "
            f"ratio {part['ratio']:.2f}"
        )
    given = {name: value for name, value in vars(options).items() if name != "json"}
    document = {"options": given, "machine": machine_facts()} | figures
    write_json(options.json, __file__, document)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
