"""Which tokens begin, end and pad: what the files beside a tokenizer name.

Owns the reading of ``tokenizer_config.json``, ``special_tokens_map.json``, ``added_tokens.json``,
``generation_config.json`` and ``config.json``, and the choice of the end of a document. Invariant:
what a file names is found, or an error says which file named it; nothing else is taken in its
place. Only where no file names an end does the vocabulary decide, and only if one known name is in
it. Tested by ``tests/data_room/test_special_tokens.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("bos_token", "eos_token", "pad_token")
EOD_HELP = "name the end-of-document token with --eod-token"
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# The first file that names a role decides.
_BY_TEXT = ("tokenizer_config.json", "special_tokens_map.json")
_BY_ID = ("generation_config.json", "config.json")


@dataclass(frozen=True, kw_only=True)
class NamedTokens:
    """What files say: texts or ids of roles with the file that says so, and tokens to be added."""

    tokens: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # role: text, file
    ids: Mapping[str, tuple[int | list[int], str]] = field(default_factory=dict)  # role: id, file
    added: Mapping[int, tuple[Mapping[str, Any], str]] = field(default_factory=dict)

    def add_to(self, core: Any) -> None:
        """Give a core of the ``tokenizers`` library the added tokens that it lacks, in the order of
        their ids. Raises ValueError where one cannot have the id that its file states.
        """
        from tokenizers import AddedToken

        registered = {token.content for token in core.get_added_tokens_decoder().values()}
        for index, (entry, file) in sorted(self.added.items()):
            text = entry["content"]
            free = core.token_to_id(text) in (None, index) and core.id_to_token(index) in (
                None,
                text,
            )
            if text not in registered and free:  # also one of the vocabulary, which keeps its id
                flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
                given = {flag: bool(entry[flag]) for flag in flags if flag in entry}
                token = AddedToken(text, **{"normalized": False, "special": True} | given)
                special = token.special
                (core.add_special_tokens if special else core.add_tokens)([token])
            if core.token_to_id(text) != index:
                raise ValueError(
                    f"{file}: added token {text!r} has the id {index}, but in the tokenizer's "
                    f"vocabulary it is {core.token_to_id(text)} and {index} is "
                    f"{core.id_to_token(index)!r}; the files belong to different tokenizers"
                )

    def find_all(
        self, vocabulary: Mapping[str, int], eod_token: str | None
    ) -> tuple[int | None, int | None, int | None]:
        """The ids of bos, eos and pad. Where ``--eod-token`` names the end, an ``eos`` that the
        vocabulary lacks is not asked for.
        """
        bos, pad = self.find("bos_token", vocabulary), self.find("pad_token", vocabulary)
        try:
            return bos, self.find("eos_token", vocabulary), pad
        except ValueError:
            if eod_token is None:
                raise
            return bos, None, pad

    def find(self, role: str, vocabulary: Mapping[str, int]) -> int | None:
        """The id of ``role``, None where no file names one. Raises ValueError for a name that the
        vocabulary lacks.
        """
        if role in self.tokens:
            text, file = self.tokens[role]
            if text not in vocabulary:
                raise ValueError(
                    f"{file}: {role} {text!r} is neither in the vocabulary nor among the added "
                    f"tokens; {_remedy(role)}"
                )
            return vocabulary[text]
        if role in self.ids:
            index, file = self.ids[role]
            if isinstance(index, list):
                raise ValueError(
                    f"{file}: {role}_id lists {index}, and no file names one {role}; "
                    f"{_remedy(role)}"
                )
            if index not in vocabulary.values():
                raise ValueError(
                    f"{file}: {role}_id {index} is not in the vocabulary; {_remedy(role)}"
                )
            return index
        return None


def read_named_tokens(directory: Path) -> NamedTokens:
    """What the files of ``directory`` name. Raises ValueError, naming file and field."""
    tokens: dict[str, tuple[str, str]] = {}
    ids: dict[str, tuple[int | list[int], str]] = {}
    added: dict[int, tuple[Mapping[str, Any], str]] = {}
    for name in _BY_TEXT:
        file, content = _read(directory / name)
        for role in ROLES:
            text = _text(content.get(role), role, file)
            if text is not None:
                tokens.setdefault(role, (text, file))
        for key, entry in _mapping(content, "added_tokens_decoder", file).items():
            if not str(key).isdigit() or not isinstance(entry, dict):
                raise ValueError(f"{file}: added_tokens_decoder[{key!r}] is not an id and a token")
            _text(entry, f"added_tokens_decoder[{key!r}]", file)
            added.setdefault(int(key), (entry, file))
    file, content = _read(directory / "added_tokens.json")
    for text, index in content.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise ValueError(f"{file}: {text!r} has the id {index!r}, which is no number")
        added.setdefault(index, ({"content": text}, file))
    for name in _BY_ID:
        file, content = _read(directory / name)
        for role in ROLES:
            index = _index(content.get(f"{role}_id"), f"{role}_id", file)
            if index is not None:
                ids.setdefault(role, (index, file))
    return NamedTokens(tokens=tokens, ids=ids, added=added)


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    if not file.is_file():
        return str(file), {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not a JSON object")
    return str(file), content


def _mapping(content: Mapping[str, Any], key: str, file: str) -> Mapping[str, Any]:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{file}: {key} is a {type(found).__name__}, not a JSON object")
    return found


def _text(value: Any, name: str, file: str) -> str | None:
    """A token as its text, or as an object with ``content``; None and "" name nothing."""
    if isinstance(value, dict):
        if not isinstance(value.get("content"), str):
            raise ValueError(f"{file}: {name} has no text under 'content'")
        value = value["content"]
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{file}: {name} is {value!r}, not the text of a token")
    return value


def _index(value: Any, name: str, file: str) -> int | list[int] | None:
    """An id; a list of one is that one."""
    several = value if isinstance(value, list) else [value]
    if value is None or value == []:
        return None
    if any(not isinstance(index, int) or isinstance(index, bool) for index in several):
        raise ValueError(f"{file}: {name} is {value!r}, which is no id")
    different = list(dict.fromkeys(several))
    return different[0] if len(different) == 1 else different


def _remedy(role: str) -> str:
    return EOD_HELP if role == "eos_token" else "correct the file"


def transformers_id(core: Any, role: str, vocabulary: Mapping[str, int], source: str) -> int | None:
    """The id of a role of a ``transformers`` tokenizer; that library gives the unknown token's id
    for a token that it does not have. Raises ValueError for one.
    """
    text = getattr(core, role)
    if text is None:
        return None
    if str(text) not in vocabulary:
        raise ValueError(
            f"{source}: {role} {str(text)!r} is not in the vocabulary; {_remedy(role)}"
        )
    return vocabulary[str(text)]


def find_eod(
    vocabulary: Mapping[str, int], eos: int | None, eod_token: str | None, source: str
) -> int:
    """The id that ends a document: the token that ``--eod-token`` names, the ``eos`` of the files,
    or the one well-known name of the vocabulary. Raises ValueError where that is none, or several.
    """
    if eod_token is not None:
        if eod_token not in vocabulary:
            raise ValueError(f"--eod-token {eod_token!r}: not in the vocabulary of {source}")
        return vocabulary[eod_token]
    if eos is not None:
        return eos
    known = [name for name in _EOD_NAMES if name in vocabulary]
    if len(known) == 1:
        return vocabulary[known[0]]
    what = f"several tokens may be it ({', '.join(known)})" if known else "none found"
    raise ValueError(f"{source}: no file names an end-of-document token, and {what}; {EOD_HELP}")
