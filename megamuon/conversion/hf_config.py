"""``config.json`` of a Hugging Face folder, as values of our flags and back.

Owns the reading of every field (used, harmless, or refused by name) and the writing of a config
that reads back as the very values that it was made from.  Invariant: what our model does not
compute is an error that names the field and its value, in both directions. Tested by
``tests/conversion/test_hf_config.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megamuon.conversion.families import (
    FAMILIES,
    OF_TRAINING,
    OFF,
    REFUSED,
    ROPE_KEYS,
    WINDOW_KEYS,
    ConversionError,
    Family,
    Field,
)
from megamuon.sizes import head_channels

CONFIG = "config.json"
# The only values of Llama-3.1's scaling that our model has beside its factor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_REASONS = {
    "auto_map": "the folder brings code of its own, which is never run",
    "quantization_config": "quantized weights are not read; use the unquantized folder",
}


def read_json(path: Path) -> Any:
    """A JSON file without any key twice.  Raises ConversionError naming the file."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConversionError(f"{path}: {key!r} stands there twice")
            found[key] = value
        return found

    try:
        return json.loads(path.read_bytes(), object_pairs_hook=once)
    except (OSError, ValueError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from error


def model_type_of(folder: Path) -> str | None:
    """``model_type`` of the folder's ``config.json``; None where there is none (a run of ours
    writes a ``config.json`` too).
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = read_json(path)
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


def read_config(folder: Path) -> dict[str, Any]:
    """The whole ``config.json``.  Raises ConversionError where it names no model type."""
    if model_type_of(folder) is None:
        raise ConversionError(f"{folder / CONFIG}: no model_type: not a Hugging Face folder")
    return read_json(folder / CONFIG)


def family_of(config: Mapping[str, Any], source: object) -> Family:
    """The family that ``config`` names.  Raises ConversionError for an unknown or refused one."""
    name = config.get("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    known = f"this version reads {', '.join(FAMILIES)}"
    raise ConversionError(
        f"{source}: model_type {name!r}: {REFUSED.get(str(name), 'an unknown family')}; {known}"
    )


def flags_from_config(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Values by dest of everything that the config says of the model, ``padded_vocab_size`` (rows
    of the token table) among them.  Raises ConversionError with every problem in one line.
    """
    family = family_of(config, source)
    problems: list[str] = []
    values = dict(family.flags)
    for problem in (*_unknown(config, family), *_wrong(config, family), *_windows(config, family)):
        problems.append(problem)
    try:
        values.update(_fields(config, family, problems))
    except (TypeError, ZeroDivisionError, KeyError):
        problems.append("sizes: must be numbers")
    if family.rope_base is not None:
        try:
            values.update(_rope(config, family.rope_base))
        except ConversionError as error:
            problems.append(str(error))
    if problems:
        raise ConversionError(f"{source}: {'; '.join(problems)}")
    return values


def _unknown(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    known = {*family.fields, *family.must, *family.harmless, *WINDOW_KEYS, *ROPE_KEYS, *OFF}
    for name in config:
        if name in _REASONS:
            yield f"{name}: {_REASONS[name]}"
        elif name not in known and config[name] is not None:
            value = str(config[name])
            yield f"{name} {value[:40]}: a field that this version does not know"


def _wrong(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    for name, allowed in family.must.items():
        if name in config and config[name] not in allowed:
            yield f"{name} {config[name]!r}: our model computes {allowed[0]!r} only"
    for name in sorted(OFF):
        if config.get(name):
            yield f"{name} {config[name]!r}: our model has no such thing"


def _windows(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Attention inside a window is not ours; a size that is switched off does no harm."""
    kinds = config.get("layer_types") or []
    if others := sorted({str(kind) for kind in kinds} - {"full_attention"}):
        yield f"layer_types {', '.join(others)}: our model computes full_attention only"
    size = config.get("sliding_window")
    used = config.get("use_sliding_window", family.model_type == "mixtral")
    if size and used:
        yield f"sliding_window {size} is in use: our attention sees all tokens before"


def _fields(config: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    absent: dict[str, tuple[str, Field]] = {}
    for name, field in family.fields.items():
        if config.get(name) is None:
            absent.setdefault(field.dest, (name, field))
            continue
        value = config[name]
        if field.values is not None:
            if value not in field.values:
                choices = ", ".join(map(str, field.values))
                problems.append(f"{name} {value!r}: our model has {choices}")
                continue
            value = field.values[value]
        if values.setdefault(field.dest, value) != value:
            problems.append(f"{said[field.dest]} and {name} {value!r} differ: our model has one")
        said.setdefault(field.dest, f"{name} {value!r}")
    for dest, (name, field) in absent.items():
        if dest in values:
            continue
        try:
            value = field.default(config)
        except KeyError:
            problems.append(f"{name} is missing")
            continue
        values[dest] = value if field.values is None else field.values[value]
    return values


def _rope(config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """The rotary flags, from the keys of both generations, which must say the same."""
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    kinds = []
    for found in (old, new):
        if found:
            kinds.append(str(found.pop("rope_type", found.pop("type", "default"))))
            found.pop("type", None)
    theta = new.pop("rope_theta", config.get("rope_theta"))
    if config.get("rope_theta") not in (None, theta):
        raise ConversionError(
            f"rope_theta {config['rope_theta']} and rope_parameters.rope_theta {theta} differ"
        )
    old.pop("rope_theta", None)
    if len(set(kinds)) > 1 or (old and new and old != new):
        raise ConversionError("rope_scaling and rope_parameters say different things")
    kind, scaling = (kinds or ["default"])[0], {**old, **new}
    theta = base if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta != int(theta):
        raise ConversionError(f"rope_theta {theta!r}: --rotary-base is a whole number")
    if kind == "default":
        if scaling:
            raise ConversionError(f"rope_parameters {scaling}: fields that are not known here")
        return {"rotary_base": int(theta)}
    if kind != "llama3":
        raise ConversionError(f"rope_type {kind!r}: our model has default and llama3 only")
    factor = scaling.pop("factor", None)
    if factor is None or scaling != _LLAMA3:
        raise ConversionError(f"rope_type llama3 with {scaling}: our model has {_LLAMA3} only")
    return {
        "rotary_base": int(theta),
        "use_rope_scaling": True,
        "rope_scaling_factor": float(factor),
    }


def _write_rope(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both generations: readers of one ignore the other's."""
    theta = float(flags["rotary_base"] or 10000)
    scaling: dict[str, Any] | None = None
    if flags["use_rope_scaling"]:
        scaling = {"rope_type": "llama3", "factor": flags["rope_scaling_factor"], **_LLAMA3}
    kind = scaling or {"rope_type": "default"}
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **kind},
    }


def config_from_flags(
    flags: Mapping[str, Any], *, dtype: str, origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A ``config.json`` of the model that the flags describe.

    ``flags`` are values by dest with ``padded_vocab_size``; ``dtype`` is torch's name of what is
    stored; ``origin`` is the config of the folder that the weights came from, whose harmless fields
    and spellings are kept.  Raises ConversionError naming what no family has.
    """
    flags = _normal(flags)
    kept = origin if origin and origin.get("model_type") in FAMILIES else None
    found = [FAMILIES[str(kept["model_type"])]] if kept else list(FAMILIES.values())
    reasons = []
    for family in found:
        config = _written(family, flags, kept or {})
        config["dtype"] = config["torch_dtype"] = dtype
        try:
            read = flags_from_config(config, family.model_type)
        except ConversionError:
            continue  # it needs what this model does not have
        differing = sorted(_differences(flags, read))
        if not differing:
            return config
        reasons.append((len(differing), family.model_type, ", ".join(differing)))
    _, nearest, what = min(reasons)
    raise ConversionError(
        f"no Hugging Face family computes this model: the nearest, {nearest}, has no {what}"
    )


def _normal(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Different ways to say the same, in one."""
    found = dict(flags)
    if not found["group_query_attention"]:
        found["num_query_groups"] = found["num_attention_heads"]
    if found["kv_channels"] is None:
        found["kv_channels"] = head_channels(found["hidden_size"], found["num_attention_heads"])
    if found["num_experts"] is None:
        for dest in ("moe_router_topk", "moe_router_norm_topk_prob", "moe_ffn_hidden_size"):
            found[dest] = None
    elif found["moe_ffn_hidden_size"] is None:
        found["moe_ffn_hidden_size"] = found["ffn_hidden_size"]
    if found["position_embedding_type"] != "rope":
        found["rotary_base"] = None
    if not found["use_rope_scaling"]:
        found["rope_scaling_factor"] = None
    return {**found, "group_query_attention": True}


def _differences(flags: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    read = _normal(read)
    for dest, value in read.items():
        if dest not in OF_TRAINING and flags[dest] != value:
            yield f"{dest} {flags[dest]}"


def _written(family: Family, flags: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **{name: value for name, value in origin.items() if name in family.harmless | OFF},
        **{name: origin.get(name, allowed[0]) for name, allowed in family.must.items()},
        **{name: origin[name] for name in WINDOW_KEYS if name in origin},
    }
    for name, field in sorted(family.fields.items(), key=lambda item: item[1].spare):
        value = flags[field.dest]
        if field.values is not None:
            value = next((theirs for theirs, mine in field.values.items() if mine == value), None)
        implied = _default(field, config)
        if name in origin and _reads(field, origin[name], implied) == _reads(field, value, None):
            config[name] = origin[name]
        elif not (field.spare and implied in (None, value)):
            config[name] = value
    if family.rope_base is not None:
        config.update(_write_rope(flags))
    return dict(sorted(config.items()))


def _default(field: Field, config: Mapping[str, Any]) -> Any:
    try:
        return field.default(config)
    except KeyError:
        return None


def _reads(field: Field, value: Any, implied: Any) -> Any:
    value = implied if value is None else value
    return value if field.values is None else field.values.get(value)
