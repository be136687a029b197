"""The table of Megatron's flags against the facts, and against the config fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamuon.arguments import specs_by_dest
from megamuon.arguments.mapping import MAPPERS
from megamuon.arguments.megatron_table import STATUSES, outside_flags, table, table_by_dest
from tests.support.command_lines import parse, problems

FACTS = json.loads((Path(__file__).parents[1] / "data" / "megatron_flags_300.json").read_text())

# Flags that are honoured with another default or other choices than Megatron's.
DEVIATIONS = {
    "position_embedding_type",
    "exit_signal",
    "optimizer",
    "muon_momentum",
    "muon_nesterov",
    "muon_extra_scale_factor",
    "muon_coefficient_type",
    "muon_fp32_matmul_prec",
    "distributed_backend",
    "recompute_modules",
    "moe_router_load_balancing_type",
    "dataloader_type",
    "tokenizer_type",
}
BEHAVIOUR = {  # deviates under the same default and choices
    "async_save",
    "make_vocab_size_divisible_by",
    "moe_aux_loss_coeff",
    "log_progress",
    "log_throughput",
    "profile_step_start",
    "timing_log_level",
}


def test_the_table_has_exactly_the_300_flags():
    assert len(FACTS) == 300
    assert [(e.flag, e.dest, e.default, list(e.choices)) for e in table()] == [
        tuple(fact) for fact in FACTS
    ]


def test_every_entry_has_a_status_and_says_why():
    for entry in table():
        assert entry.status in STATUSES, entry.flag
        assert entry.note or entry.status == "honoured", entry.flag


def test_a_flag_is_honoured_exactly_if_a_field_carries_it():
    fields = set(specs_by_dest())
    assert {e.dest for e in table() if e.status == "honoured"} == fields & set(table_by_dest())


def test_a_flag_is_mapped_exactly_if_a_mapper_exists():
    assert {e.dest for e in table() if e.status == "mapped"} == set(MAPPERS)


def _normal(value: object, is_bool: bool) -> object:
    if is_bool and value is None:
        return False  # Megatron leaves some switches at None
    return tuple(value) if isinstance(value, list) else value


def test_honoured_flags_have_megatrons_default_and_choices_save_declared_deviations():
    found = set()
    for dest, spec in specs_by_dest().items():
        entry = table_by_dest().get(dest)
        if entry is None:
            continue
        same_default = _normal(entry.default, spec.value_type is bool) == spec.default
        same_choices = entry.choices == tuple(str(c) for c in spec.choices or ())
        assert set(entry.flags) <= set(spec.spellings), dest
        if not (same_default and same_choices):
            found.add(dest)
    declared = {e.dest for e in table() if e.deviation}
    # exit_signal's choices in Megatron are every signal of the system, which the facts leave out.
    assert found == DEVIATIONS
    assert declared == DEVIATIONS | BEHAVIOUR


def test_values_that_megatron_has_and_we_lack_get_a_reason():
    for dest, spec in specs_by_dest().items():
        entry = table_by_dest().get(dest)
        if entry is None or spec.choices is None:
            continue
        ours = {str(choice) for choice in spec.choices}
        assert set(entry.choices) - ours <= set(entry.refuse) | set(entry.map_values), dest
        assert not ours & set(entry.refuse), dest
        assert all(target["to"] in ours for target in entry.map_values.values()), dest


def _given(entry) -> str:
    if entry.kind in ("store_true", "store_false"):
        return entry.flag
    count = entry.nargs if isinstance(entry.nargs, int) else 1
    free = [c for c in entry.choices if c not in entry.refuse and c not in entry.accept]
    return f"{entry.flag} {' '.join([free[0] if free else '7'] * count)}"


@pytest.mark.parametrize(
    "entry", [e for e in table() if e.status == "refused"], ids=lambda e: e.dest
)
def test_a_refused_flag_is_a_problem_with_the_reason(entry):
    found = problems(_given(entry))
    assert len(found) == 1
    assert found[0].startswith(entry.flag)
    assert entry.note in found[0]
    for value in entry.accept:
        assert any(entry.flag in note for note in parse(f"{entry.flag} {value}").notes)


@pytest.mark.parametrize(
    "entry", [e for e in table() if e.status == "accepted"], ids=lambda e: e.dest
)
def test_an_accepted_flag_prints_a_note(entry):
    assert any(entry.flag in note and entry.note in note for note in parse(_given(entry)).notes)
    for value, reason in entry.refuse.items():
        assert reason in "".join(problems(f"{entry.flag} {value}"))


def test_all_other_megatron_flags_are_known_by_name():
    assert len(outside_flags()) > 500
    assert not outside_flags() & {name for entry in table() for name in entry.flags}
    found = problems("--use-flash-attn --use-mcore-models")
    assert [p.split(":")[0] for p in found] == ["--use-flash-attn", "--use-mcore-models"]
    assert all("outside this program's table" in problem for problem in found)
