"""Which form, dtype, restarts and kernel a configuration comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamuon.optim.ns_plan import Counter, NewtonSchulzConfig, NewtonSchulzPlan


def plan(
    rows: int,
    cols: int,
    device: str = "cpu",
    input_dtype: torch.dtype = torch.float32,
    **config: Any,
) -> NewtonSchulzPlan:
    chosen = NewtonSchulzConfig(**config)
    return chosen.plan(rows, cols, device_type=device, input_dtype=input_dtype)


def test_dtype_by_device_and_input() -> None:
    assert plan(8, 64).dtype == torch.float32
    assert plan(8, 64, input_dtype=torch.bfloat16).dtype == torch.float32
    assert plan(8, 64, input_dtype=torch.float64).dtype == torch.float64
    assert plan(8, 64, device="cuda").dtype == torch.float16
    assert plan(8, 64, device="cuda", input_dtype=torch.float64).dtype == torch.float64
    assert plan(8, 64, input_dtype=torch.float64).kernel == "gram/fp64"
    assert plan(8, 64, input_dtype=torch.float64, dtype="fp32").kernel == "gram/fp32"


@pytest.mark.parametrize(
    ("fraction", "rows", "cols", "form"),
    [
        (1.0, 100, 150, "standard"),  # a tie at the break-even aspect ratio 1.5
        (1.0, 100, 151, "gram"),
        (1.0, 151, 100, "gram"),
        (0.625, 100, 115, "standard"),  # 3 s / (1 + s) = 1.1538
        (0.625, 100, 116, "gram"),
        (0.5, 100, 100, "standard"),  # 1
        (0.5, 100, 101, "gram"),
    ],
)
def test_break_even_aspect_ratio(fraction: float, rows: int, cols: int, form: str) -> None:
    assert plan(rows, cols, symmetric_fraction=fraction).form == form


def test_break_even_follows_the_kernel_of_the_device() -> None:
    assert plan(1000, 1400).kernel == "gram/fp32/symmetric"
    assert plan(1000, 1400, symmetric_kernel=False).kernel == "standard/fp32"
    assert plan(1000, 1400, device="cuda").kernel == "standard/fp16"
    assert plan(352, 512).kernel == "standard/fp32"


def test_restarts_by_dtype() -> None:
    assert plan(8, 64).restarts == (2,)
    assert plan(8, 64, coefficients="jordan").restarts == (3,)
    assert plan(8, 64, device="cuda").restarts == (2,)
    assert plan(8, 64, dtype="bf16").restarts == (2, 4)
    assert plan(8, 64, coefficients="deepseek_v4").restarts == (2, 4, 6)
    assert plan(8, 64, restarts=(1, 3)).restarts == (1, 3)


def test_standard_form_where_no_gram_form_is_safe() -> None:
    assert plan(8, 64, coefficients="cans", device="cuda").form == "standard"
    assert plan(8, 64, coefficients="cans").form == "gram"
    assert plan(8, 64, steps=1).form == "standard"
    with pytest.raises(ValueError, match="'cans'.*no safe Gram form in fp16"):
        plan(8, 64, coefficients="cans", device="cuda", form="gram")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"form": "grm"}, "form = 'grm'.*auto, standard, gram"),
        ({"dtype": "half"}, "dtype = 'half'"),
        ({"normalization": "none"}, "normalization = 'none'"),
        ({"coefficients": "nope"}, "unknown Newton–Schulz coefficients 'nope'"),
        ({"restarts": (0,)}, "restarts = .*1..4"),
        ({"restarts": (3, 2)}, "must rise"),
        ({"restarts": (5,)}, "1..4 for 5 steps"),
        ({"symmetric_fraction": 0.2}, "between 0.5 and 1"),
        ({"norm_in_iteration_dtype": True}, "'clamp' or 'add'"),
        ({"form": "gram", "dtype": "bf16", "restarts": (2,)}, "BF16 needs two restarts"),
        ({"coefficients": "cubic5", "steps": 4}, "cubic5"),
    ],
)
def test_bad_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NewtonSchulzConfig(**config)


def test_counter() -> None:
    counter = Counter()
    counter.count("gram/fp32", 3)
    counter.count("standard/fp32", 1)
    counter.count("gram/fp32", 2)
    assert counter.matrices == 6
    assert counter.by_kernel == {"gram/fp32": 5, "standard/fp32": 1}
