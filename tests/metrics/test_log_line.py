"""The log line against Megatron-LM's format and against the regular expressions that read it."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import datetime

import pytest

from megamuon.metrics.log_line import LogRecord, extra_text, log_line, memory_line, validation_block

NOW = datetime(2026, 8, 22, 15, 22, 22, 123456)
RECORD = LogRecord(
    iteration=10,
    train_iterations=1000,
    consumed_samples=160,
    milliseconds_per_iteration=123.4,
    tflops_per_gpu=45.6,
    learning_rate=3e-4,
    global_batch_size=16,
    losses={"lm loss": 9.123456},
    grad_norm=1.234,
)


def test_the_line_is_megatrons() -> None:
    assert log_line(RECORD, NOW) == (
        " [2026-08-22 15:22:22] iteration       10/    1000 | consumed samples:          160 |"
        " elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 45.6 |"
        " learning rate: 3.000000E-04 | global batch size:    16 | lm loss: 9.123456E+00 |"
        " loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def test_every_optional_field_has_its_place() -> None:
    full = dataclasses.replace(
        RECORD,
        skipped_samples=32,
        losses={"lm loss": 1.0, "z_loss": 2.0},
        zeros_in_grad=7,
        params_norm=3.0,
        extra={"muon update rms": 0.201, "tokens/s": 1024},
        skipped_iterations=2,
        nan_iterations=1,
    )
    names = [
        "iteration",
        "consumed samples",
        "skipped samples",
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "learning rate",
        "global batch size",
        "lm loss",
        "z_loss",
        "loss scale",
        "grad norm",
        "num zeros",
        "params norm",
        "muon update rms",
        "tokens/s",
        "number of skipped iterations",
        "number of nan iterations",
    ]
    line = log_line(full, NOW)
    body = line.split("] ", 1)[1]
    found = [
        re.sub(r"^iteration .*", "iteration", part.split(":")[0]) for part in body.split(" | ")
    ]
    assert found == names
    assert " muon update rms: 0.201 | tokens/s: 1024 | number of skipped iterations:   2 |" in line


def test_optional_fields_are_left_out() -> None:
    bare = dataclasses.replace(
        RECORD, tflops_per_gpu=None, learning_rate=None, grad_norm=None, losses={}
    )
    line = log_line(bare, NOW)
    for name in ("TFLOP", "learning rate", "grad norm", "lm loss", "skipped samples", "None"):
        assert name not in line


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        (r"iteration\s+(\d+)/\s*(\d+)", ("10", "1000")),
        (r"lm loss: ([0-9.E+-]+)", ("9.123456E+00",)),
        (r"lm loss: ([\d\.E\+\-]+) \|", ("9.123456E+00",)),
        (r"consumed samples:\s+(\d+) \|", ("160",)),
        (r"elapsed time per iteration \(ms\): ([0-9.]+)", ("123.4",)),
        (r"throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)", ("45.6",)),
        (r"learning rate: (\S+) \| global batch size:\s+(\d+)", ("3.000000E-04", "16")),
        (r"grad norm: (\d+\.\d+)", ("1.234",)),
        (r"^ \[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] iteration", ("2026-08-22 15:22:22",)),
        (r"number of nan iterations:\s+(\d+) \|$", ("0",)),
    ],
)
def test_usual_parsers_read_it(pattern: str, groups: tuple[str, ...]) -> None:
    found = re.search(pattern, log_line(RECORD, NOW))
    assert found is not None
    assert found.groups() == groups


@pytest.mark.parametrize(
    ("loss", "text"), [(-1.5, "-1.500000E+00"), (math.nan, "NAN"), (math.inf, "INF")]
)
def test_odd_losses_are_printed(loss: float, text: str) -> None:
    line = log_line(dataclasses.replace(RECORD, losses={"lm loss": loss}), NOW)
    found = re.search(r"lm loss: (\S+) \|", line)
    assert found is not None
    assert found.group(1) == text
    assert float(text) == loss or math.isnan(loss)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.201, "0.201"),
        (0.0, "0.000"),
        (2e-5, "2.000E-05"),
        (7, "7"),
        ("x", "x"),
        (math.nan, "nan"),
    ],
)
def test_extra_fields(value: float | int | str, text: str) -> None:
    assert extra_text(value) == text


def test_validation_block() -> None:
    top, line, bottom = validation_block("iteration 100", {"lm loss": math.pi}).split("\n")
    assert line == (
        " validation loss at iteration 100 | lm loss value: 3.141593E+00 |"
        " lm loss PPL: 2.314069E+01 | "
    )
    assert top == bottom == "-" * (len(line) + 1)
    named = validation_block("iteration 3 on test set", {"lm loss": 100.0}, "code")
    assert " validation-code loss at iteration 3 on test set | " in named
    assert "PPL: 4.851652E+08" in named  # exp(20): the exponent is capped
    assert "PPL: NAN" in validation_block("x", {"lm loss": math.nan})


def test_memory_line() -> None:
    sizes = {"allocated": 2**20, "max allocated": 3 * 2**19}
    assert memory_line(3, 1, sizes) == (
        "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 1.50"
    )
