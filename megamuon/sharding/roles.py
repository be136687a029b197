"""Roles of parameters under tensor parallelism, from their qualified names.

Owns ``Role``, ``RULES`` and ``classify``. Invariant: a rule looks at whole segments of a module
path from its end (``q_proj`` never matches ``seq_proj``), the first rule that matches decides, and
a parameter that no rule knows is the planner's error, never a silent replica. Source:
HyperParallel-FSDP, section 4.1, pass 1. Tested by ``tests/sharding/test_roles.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The part that a module's parameters (weight and bias) play in the tensor-parallel plan."""

    QUERY = "query"  # rows are heads
    KEY_VALUE = "key_value"  # rows are key/value groups
    ATTENTION_OUTPUT = "attention_output"  # columns are heads
    HEAD_NORM = "head_norm"  # the gain of a norm over the channels of one head
    COLUMN = "column"  # rows are inner features of an MLP
    ROW = "row"  # columns are inner features of an MLP
    EXPERT_COLUMN = "expert_column"  # the same two, of one expert of a mixture
    EXPERT_ROW = "expert_row"
    ROUTER = "router"  # tokens onto experts
    GATE = "gate"  # a scalar per token
    VOCABULARY_TABLE = "vocabulary_table"  # rows are tokens
    VOCABULARY_HEAD = "vocabulary_head"
    POSITION_TABLE = "position_table"  # rows are positions
    NORM = "norm"  # over the residual stream
    REPLICATED = "replicated"  # anything, where there is one tp rank


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The last segments of a module path, ``*`` for any one segment, and what they mean.

    ``levels``: how many segments above the module its communication boundary lies (0: the module
    itself; 1: its parent, which computes it together with its siblings).
    """

    path: tuple[str, ...]
    role: Role
    levels: int = 0


RULES: tuple[Rule, ...] = (
    Rule(path=("q_proj",), role=Role.QUERY, levels=1),
    Rule(path=("k_proj",), role=Role.KEY_VALUE, levels=1),
    Rule(path=("v_proj",), role=Role.KEY_VALUE, levels=1),
    Rule(path=("o_proj",), role=Role.ATTENTION_OUTPUT, levels=1),
    Rule(path=("q_norm",), role=Role.HEAD_NORM, levels=1),
    Rule(path=("k_norm",), role=Role.HEAD_NORM, levels=1),
    Rule(path=("experts", "*", "gate_proj"), role=Role.EXPERT_COLUMN, levels=2),
    Rule(path=("experts", "*", "up_proj"), role=Role.EXPERT_COLUMN, levels=2),
    Rule(path=("experts", "*", "down_proj"), role=Role.EXPERT_ROW, levels=2),
    Rule(path=("gate_proj",), role=Role.COLUMN, levels=1),
    Rule(path=("up_proj",), role=Role.COLUMN, levels=1),
    Rule(path=("down_proj",), role=Role.ROW, levels=1),
    Rule(path=("gate",), role=Role.ROUTER),
    Rule(path=("shared_expert_gate",), role=Role.GATE),
    Rule(path=("embed_tokens",), role=Role.VOCABULARY_TABLE),
    Rule(path=("lm_head",), role=Role.VOCABULARY_HEAD),
    Rule(path=("position_embeddings",), role=Role.POSITION_TABLE),
    Rule(path=("input_layernorm",), role=Role.NORM),
    Rule(path=("post_attention_layernorm",), role=Role.NORM),
    Rule(path=("norm",), role=Role.NORM),
)


def _matches(rule: Rule, segments: tuple[str, ...]) -> bool:
    tail = segments[-len(rule.path) :]
    return len(tail) == len(rule.path) and all(
        wanted in ("*", found) for wanted, found in zip(rule.path, tail, strict=True)
    )


def classify(module_path: str) -> tuple[Role, str] | None:
    """Role of the parameters of the module at ``module_path``, and the path of the module whose
    boundary they belong to; None where no rule matches.
    """
    segments = tuple(module_path.split("."))
    for rule in RULES:
        if _matches(rule, segments):
            return rule.role, ".".join(segments[: len(segments) - rule.levels])
    return None
