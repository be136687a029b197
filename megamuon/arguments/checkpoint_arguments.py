"""Model and tokenizer flags taken from a checkpoint or a Hugging Face folder.

Owns what ``--use-checkpoint-args`` means, and what a Hugging Face folder in ``--load`` or
``--pretrained-checkpoint`` fills. Invariant: only architecture and tokenizer values are
taken, and an explicit flag wins with a printed note (in Megatron it is silently overridden,
NVIDIA/Megatron-LM #2616). Tested by ``tests/arguments/test_checkpoint_arguments.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megamuon.arguments.config import specs_by_dest
from megamuon.arguments.mapping import Filled

CheckpointArgsReader = Callable[[str, int | None], Mapping[str, Mapping[str, Any]] | None]
FolderArgsReader = Callable[[str], Mapping[str, Mapping[str, Any]] | None]

COMPONENTS = ("model", "tokenizer")


def merged_values(saved: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> Filled:
    """Values by dest from the saved nested arguments (``config_to_json``'s form), less those in
    ``given``.
    """
    filled = Filled()
    specs = specs_by_dest()
    for component in COMPONENTS:
        for dest, stored in saved.get(component, {}).items():
            value = tuple(stored) if isinstance(stored, list) else stored
            if dest not in specs or specs[dest].component != component:
                filled.problems.append(
                    f"--use-checkpoint-args: the checkpoint has {component}.{dest}, which is no "
                    "flag here"
                )
            elif dest not in given:
                filled.values[dest] = value
            elif given[dest] != value:
                filled.notes.append(
                    f"{specs[dest].flag} {given[dest]}: wins over the checkpoint's value {value}"
                )
    return filled


def folder_values(given: Mapping[str, Any], reader: FolderArgsReader | None) -> Filled:
    """Values of the Hugging Face folder that weights are to come from; nothing where there is
    none.
    """
    for name in ("load", "pretrained_checkpoint"):
        if reader is None or not given.get(name):
            continue
        flag = specs_by_dest()[name].flag
        try:
            said = reader(given[name])
        except ValueError as error:
            return Filled(problems=[f"{flag}: {error}"])
        if said is None:
            continue
        if {"tokenizer_type", "tokenizer_model"} & set(given):  # a tokenizer of its own
            rows = {"padded_vocab_size": said["tokenizer"]["padded_vocab_size"]}
            said = {**said, "tokenizer": rows}
        filled = merged_values(said, given)
        filled.notes.append(f"{flag} {given[name]}: model flags from its config.json")
        return filled
    return Filled()


def checkpoint_values(
    given: Mapping[str, Any], reader: CheckpointArgsReader | None, *, needed: bool = True
) -> Filled:
    """Values for ``--use-checkpoint-args``; nothing when it was not given.  Not ``needed``: a
    folder without a checkpoint has filled the flags already.
    """
    if not given.get("use_checkpoint_args"):
        return Filled()
    places = [given[name] for name in ("load", "pretrained_checkpoint") if given.get(name)]
    if not places:
        return Filled(problems=["--use-checkpoint-args: needs --load or --pretrained-checkpoint"])
    if reader is None:
        return Filled(
            problems=["--use-checkpoint-args: this program reads no checkpoint; remove it"]
        )
    for place in places:
        step = given.get("ckpt_step") if place == given.get("load") else None
        try:
            saved = reader(place, step)
        except (OSError, ValueError) as error:
            return Filled(problems=[f"--use-checkpoint-args: {place}: {error}"])
        if saved is not None:
            return merged_values(saved, given)
    missing = f"--use-checkpoint-args: no checkpoint in {' or '.join(places)}"
    return Filled(problems=[missing] if needed else [])
