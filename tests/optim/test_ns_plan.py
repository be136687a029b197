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
    assert plan(64, 512).dtype == torch.float32
    assert plan(64, 512, input_dtype=torch.bfloat16).dtype == torch.float32
    assert plan(64, 512, input_dtype=torch.float64).dtype == torch.float64
    assert plan(64, 512, device="cuda").dtype == torch.float16
    assert plan(64, 512, device="cuda", input_dtype=torch.float64).dtype == torch.float64
    assert plan(64, 512, input_dtype=torch.float64).kernel == "gram/fp64"
    assert plan(64, 512, input_dtype=torch.float64, dtype="fp32").kernel == "gram/fp32"


def test_dtype_of_auto_on_cpus_is_what_the_configuration_says() -> None:
    assert plan(320, 320, cpu_dtype="bf16").dtype == torch.bfloat16
    assert plan(320, 320).dtype == torch.float32
    assert plan(320, 320, cpu_dtype="bf16", input_dtype=torch.float64).dtype == torch.float64
    assert plan(320, 320, cpu_dtype="bf16", device="cuda").dtype == torch.float16
    assert plan(320, 320, cpu_dtype="bf16", device="mps").dtype == torch.float32
    assert plan(320, 320, cpu_dtype="bf16", dtype="fp32").dtype == torch.float32
    assert plan(320, 320, dtype="bf16").dtype == torch.bfloat16


def test_a_gram_form_that_is_not_safe_in_bf16_stays_in_fp32() -> None:
    for config in ({"coefficients": "cans", "form": "gram"}, {"restarts": (2,)}):
        found = plan(320, 1024, cpu_dtype="bf16", **config)
        assert (found.form, found.dtype) == ("gram", torch.float32)
    assert plan(320, 1024, cpu_dtype="bf16", form="gram").kernel == "gram/bf16"
    assert plan(320, 1024, cpu_dtype="bf16", coefficients="cans").kernel == "standard/bf16"
    assert plan(320, 1024, cpu_dtype="bf16", restarts=(2, 4)).kernel == "gram/bf16"


@pytest.mark.parametrize(("rows", "cols"), [(50, 87), (87, 50), (111, 4096), (4096, 111)])
def test_small_matrices_of_auto_are_fp32_on_cpus(rows: int, cols: int) -> None:
    assert plan(rows, cols, cpu_dtype="bf16").dtype == torch.float32
    assert plan(rows, cols, dtype="bf16").dtype == torch.bfloat16  # as it was asked for
    assert plan(112, 4096, cpu_dtype="bf16").dtype == torch.bfloat16


def test_bf16_multiplies_whole_matrices_where_fp32_uses_symmetry() -> None:
    assert plan(1024, 1024).kernel == "standard/fp32/symmetric"
    assert plan(1024, 1024, cpu_dtype="bf16").kernel == "standard/bf16"
    assert plan(1024, 1024, dtype="bf16").kernel == "standard/bf16"
    assert plan(1024, 1024, dtype="fp16").kernel == "standard/fp16"


@pytest.mark.parametrize(
    ("rows", "cols", "form"),
    [
        (50, 87, "standard"),  # the calls of the Gram form cost more than it saves
        (87, 50, "standard"),
        (20, 60, "standard"),
        (64, 128, "standard"),
        (64, 256, "gram"),
        (320, 1024, "gram"),
    ],
)
def test_small_matrices_take_the_standard_form_on_cpus(rows: int, cols: int, form: str) -> None:
    for dtype in ("fp32", "fp64"):
        assert plan(rows, cols, dtype=dtype).form == form
    assert plan(rows, cols, device="cuda").form == "gram"
    assert plan(rows, cols, form="gram").form == "gram"
    assert plan(64, 256, dtype="bf16").form == "standard"  # its calls cost more
    assert plan(320, 1024, dtype="bf16").form == "gram"


@pytest.mark.parametrize(
    ("fraction", "rows", "cols", "form"),
    [
        (1.0, 1000, 1500, "standard"),  # a tie at the break-even aspect ratio 1.5
        (1.0, 1000, 1501, "gram"),
        (1.0, 1501, 1000, "gram"),
        (0.625, 1000, 1153, "standard"),  # 3 s / (1 + s) = 1.1538
        (0.625, 1000, 1160, "gram"),
        (0.5, 1000, 1000, "standard"),  # 1
        (0.5, 1000, 1001, "gram"),
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
    assert plan(64, 512).restarts == (2,)
    assert plan(64, 512, coefficients="jordan").restarts == (3,)
    assert plan(64, 512, device="cuda").restarts == (2,)
    assert plan(128, 1024, dtype="bf16").restarts == (2, 4)
    assert plan(64, 512, coefficients="deepseek_v4").restarts == (2, 4, 6)
    assert plan(64, 512, restarts=(1, 3)).restarts == (1, 3)


def test_standard_form_where_no_gram_form_is_safe() -> None:
    assert plan(64, 512, coefficients="cans", device="cuda").form == "standard"
    assert plan(64, 512, coefficients="cans").form == "gram"
    assert plan(64, 512, steps=1).form == "standard"
    with pytest.raises(ValueError, match="'cans'.*no safe Gram form in fp16"):
        plan(64, 512, coefficients="cans", device="cuda", form="gram")


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
