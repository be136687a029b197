"""Roles from qualified names: whole segments, from the end, the first rule wins."""

from __future__ import annotations

import pytest

from megamuon.sharding.roles import Role, classify


@pytest.mark.parametrize(
    ("path", "role", "boundary"),
    [
        ("model.layers.0.self_attn.q_proj", Role.QUERY, "model.layers.0.self_attn"),
        ("model.layers.0.self_attn.v_proj", Role.KEY_VALUE, "model.layers.0.self_attn"),
        ("model.layers.0.self_attn.q_norm", Role.HEAD_NORM, "model.layers.0.self_attn"),
        ("model.layers.0.mlp.up_proj", Role.COLUMN, "model.layers.0.mlp"),
        ("model.layers.0.mlp.down_proj", Role.ROW, "model.layers.0.mlp"),
        ("layers.0.mlp.experts.17.up_proj", Role.EXPERT_COLUMN, "layers.0.mlp.experts"),
        ("layers.0.mlp.experts.17.down_proj", Role.EXPERT_ROW, "layers.0.mlp.experts"),
        ("layers.0.mlp.shared_expert.down_proj", Role.ROW, "layers.0.mlp.shared_expert"),
        ("layers.0.mlp.shared_expert_gate", Role.GATE, "layers.0.mlp.shared_expert_gate"),
        ("layers.0.mlp.gate", Role.ROUTER, "layers.0.mlp.gate"),
        ("model.embed_tokens", Role.VOCABULARY_TABLE, "model.embed_tokens"),
        ("lm_head", Role.VOCABULARY_HEAD, "lm_head"),
        ("model.norm", Role.NORM, "model.norm"),
    ],
)
def test_known_names(path: str, role: Role, boundary: str) -> None:
    assert classify(path) == (role, boundary)


@pytest.mark.parametrize("path", ["", "seq_proj", "layers.0.my_norm", "q_proj.0", "router"])
def test_other_names_have_no_role(path: str) -> None:
    assert classify(path) is None
