"""What README's table of Muon says of Megatron-LM, row by row, against its formulas written out.

``tests/data/megatron_muon.json`` holds Megatron's coefficient sets and results of its iteration,
computed in FP64; the functions here are the same formulas in torch, for comparisons bit for bit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.arguments import specs_by_dest
from megamuon.arguments.megatron_table import table
from megamuon.matrices import collect
from megamuon.models import GPT
from megamuon.optim import (
    Item,
    Muon,
    MuonConfig,
    NewtonSchulzConfig,
    coefficient_set,
    orthogonalize,
    update_scale,
)
from megamuon.training.builders import optimizer_settings
from tests.support.command_lines import parse, problems
from tools.reference_training import model_config

ROOT = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = json.loads((ROOT / "tests/data/megatron_muon.json").read_text())
SHAPES = [(24, 60), (60, 24), (40, 40), (128, 320), (1, 9)]


def sequence(name: str, steps: int) -> list[tuple[float, float, float]]:
    listed, cycles = (FACTS["sets"][name][key] for key in ("polynomials", "extension"))
    last = len(listed) - 1
    indices = [i % len(listed) if cycles == "cycle" else min(i, last) for i in range(steps)]
    return [tuple(listed[index]) for index in indices]


def megatron_newton_schulz(gradient: Tensor, name: str, steps: int, dtype: torch.dtype) -> Tensor:
    """FP32 in, over the norm (at least 1e-15), the quintics in ``dtype``, FP32 out."""
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.mT if tall else gradient
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / norm.clamp_min(1e-15)).to(dtype)
    for a, b, c in sequence(name, steps):
        gram = x @ x.mT
        if c:
            inner = torch.addmm(gram, gram, gram, alpha=c, beta=b)
            x = torch.addmm(x, inner, x, alpha=1.0, beta=a)
        else:
            x = torch.addmm(x, gram, x, alpha=b, beta=a)
    x = x.to(torch.float32)
    return x.mT if tall else x


def megatron_scale(rows: int, cols: int, mode: str) -> float:
    return {
        "spectral": max(rows, cols) ** 0.5,
        "unit_rms_norm": (rows / cols) ** 0.5,
        "shape_scaling": max(1, rows / cols) ** 0.5,
    }[mode]


def ours(name: str, dtype: Any, **more: Any) -> NewtonSchulzConfig:
    """Our configuration that computes Megatron's formula in its order."""
    return NewtonSchulzConfig(
        coefficients=FACTS["sets"][name]["ours"],
        form="standard",
        dtype=dtype,
        normalization="clamp",
        eps=1e-15,
        symmetric_kernel=False,
        **more,
    )


@pytest.mark.parametrize("name", FACTS["sets"])
def test_sets_hold_the_same_numbers(name: str) -> None:
    theirs, chosen = FACTS["sets"][name], coefficient_set(FACTS["sets"][name]["ours"])
    steps = 5 if theirs["extension"] == "exact" else 12
    assert [*chosen.sequence(steps)] == sequence(name, steps)
    assert chosen.norm_factor == 1.0
    assert chosen.sequence(5) == tuple(sequence(name, 5))


@pytest.mark.parametrize("vector", FACTS["vectors"], ids=lambda v: f"{v['set']}-{v['steps']}")
@pytest.mark.parametrize("normalization", ["max", "clamp"])
def test_golden_vectors(vector: dict[str, Any], normalization: Any) -> None:
    matrix = torch.tensor(vector["input"], dtype=torch.float64)
    config = NewtonSchulzConfig(
        coefficients=FACTS["sets"][vector["set"]]["ours"],
        steps=vector["steps"],
        normalization=normalization,
    )
    expected = torch.tensor(vector["output"], dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrix, config), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FACTS["sets"])
@pytest.mark.parametrize(("dtype", "wide"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_iteration_bit_for_bit(
    name: str, shape: tuple[int, int], dtype: Any, wide: torch.dtype
) -> None:
    steps = 5 if FACTS["sets"][name]["extension"] == "exact" else 9
    for seed in range(2):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        found = orthogonalize(matrix, ours(name, dtype, steps=steps))
        expected = megatron_newton_schulz(matrix, name, steps, wide)
        # CANS has no safety: in BF16 a norm that is rounded below 1 diverges, there as here.
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=name == "cans")


def test_polar_express_is_another_set_here() -> None:
    """Why Megatron's set has a name of its own: updates differ by some per cent."""
    matrix = torch.randn(64, 160, dtype=torch.float64)
    theirs = orthogonalize(matrix, NewtonSchulzConfig(coefficients="megatron_polar_express"))
    for name in ("polar_express", "polar_express_101", "polar_express_102"):
        mine = orthogonalize(matrix, NewtonSchulzConfig(coefficients=name))
        assert 0.01 < float((mine - theirs).norm() / theirs.norm()) < 0.2


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_scales_are_the_same(mode: Any) -> None:
    for rows, cols in [*SHAPES, (8960, 1536), (1536, 8960)]:
        assert update_scale(mode, rows, cols) == megatron_scale(rows, cols, mode)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_whole_update_follows_megatron(nesterov: bool, wd: float) -> None:
    """Its order: decay, momentum as a mean, Newton-Schulz, scale; five steps with other rates."""
    config = MuonConfig(
        momentum=0.9,
        nesterov=nesterov,
        momentum_form="ema",
        scale="spectral",
        newton_schulz=ours("quintic", "bf16"),
    )
    weight = torch.randn(24, 60)
    theirs, buffer = weight.clone(), torch.zeros_like(weight)
    muon, state = Muon(config), {}
    state = muon.init_state(weight)
    for step in range(5):
        gradient, lr = torch.randn(24, 60), 1e-2 / (1 + step)
        theirs.add_(theirs, alpha=-wd * lr)
        buffer.lerp_(gradient, 1 - 0.9)
        inputs = gradient.lerp(buffer, 0.9) if nesterov else buffer
        update = megatron_newton_schulz(inputs, "quintic", 5, torch.bfloat16)
        theirs.add_(update * megatron_scale(24, 60, "spectral") * 1.0, alpha=-lr)
        item = Item(
            name="w",
            parameter=weight,
            gradient=gradient,
            state=state,
            lr=lr,
            wd=wd,
            logical_shape=(24, 60),
        )
        muon.update([item])
    # The scale is folded into the rate here, which rounds apart by a digit of each update.
    torch.testing.assert_close(weight, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(state["momentum_buffer"], buffer)


# --- README's table ------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## The Muon recipe")[1].split("For Megatron's numbers")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def first_value(cell: str) -> Any:
    word = re.split(r"[\s,;:]", cell.replace("`", ""))[0]
    return {"on": True, "off": False}.get(word, word)


def test_the_table_names_the_defaults_of_both() -> None:
    megatron = {flag: entry for entry in table() for flag in entry.flags}
    checked = []
    for what, flag, here, there in rows():
        name = re.search(r"--[\w-]+", flag)
        if name is None or what.startswith("dtype"):
            continue
        entry = megatron[name.group()]
        spec = specs_by_dest()[entry.dest]
        assert str(spec.default) == str(first_value(here)), what
        there = here if there == "the same" else there
        assert str(entry.default) == str(first_value(there)), what
        checked.append(what)
    assert len(checked) == 8


def test_what_is_a_matrix() -> None:
    """The rows without a flag: query, key, value, gate and up are declared apart, routers not."""
    with torch.device("meta"):
        found = {
            p.name: p for p in collect(GPT(model_config("nano-moe")), layers=GPT.layer_classes)
        }
    for part in ("q_proj", "k_proj", "v_proj"):
        assert found[f"model.layers.0.self_attn.{part}.weight"].route.value == "matrix"
    for part in ("gate_proj", "up_proj"):
        assert found[f"model.layers.0.mlp.experts.0.{part}.weight"].route.value == "matrix"
    assert found["model.layers.0.mlp.gate.weight"].route.value != "matrix"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("simple", "jordan"),
        ("deepseekv4", "deepseek_v4"),
        ("megatron_polar_express", "megatron_polar_express"),
        ("cans", "cans"),
    ],
)
def test_megatrons_names_on_the_command_line(given: str, taken: str) -> None:
    parsed = parse(f"--muon-coefficient-type {given} --muon-num-ns-steps 6")
    assert parsed.config.optimizer.muon_coefficient_type == taken
    assert optimizer_settings(parsed.config).newton_schulz.coefficients == taken
    assert any(given in note for note in parsed.notes) == (given != taken)


def test_sets_that_are_not_here_are_refused() -> None:
    (problem,) = problems("--muon-coefficient-type aol")
    assert "--muon-coefficient-type aol: refused" in problem
    assert "megatron_polar_express" in specs_by_dest()["muon_coefficient_type"].help
