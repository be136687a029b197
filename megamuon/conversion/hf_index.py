"""The tensors of a Hugging Face folder as a ``TensorIndex`` under our names.

Owns the list of a folder's weight files and the match of its tensors with our parameters, by the
names of either generation of ``transformers``.  Invariant: every parameter of ours lies at exactly
one place with the right shape, and every stored element is a parameter's, a tied table's second
copy (compared), or a buffer known by name; anything else is an error.  No pickle is opened.
Tested by ``tests/conversion/test_hf_index.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megamuon.checkpoint.chunks import Chunk
from megamuon.checkpoint.tensors import DTYPES, Piece, TensorEntry, TensorIndex, View, listed
from megamuon.conversion.families import STORED_BUFFERS, ConversionError, Family, Name
from megamuon.conversion.hf_config import read_json
from megamuon.conversion.tensor_file import Reader, Stored, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Shapes = Mapping[str, tuple[int, ...]]  # of our parameters, by name


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor of the folder."""

    file: str
    key: str
    stored: Stored


@dataclass(frozen=True, kw_only=True)
class FolderIndex:
    """What a folder holds for a model."""

    index: TensorIndex
    named: tuple[str, ...] = field(default=())  # tensors that are read for nothing, with reason


def weight_files(folder: Path) -> list[str] | None:
    """Names of the folder's safetensors files; None where there are none at all.

    Raises ConversionError for an index that points outside, to a missing file, or holds a name
    twice, and for a folder whose weights are pickled.
    """
    if (folder / INDEX).is_file():
        table = read_json(folder / INDEX)
        files = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(files, dict) or not files:
            raise ConversionError(f"{folder / INDEX}: no weight_map")
        for key, name in files.items():
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise ConversionError(f"{folder / INDEX}: {key} in {name!r}: not a plain file name")
        names = sorted(set(files.values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConversionError(
                f"{folder / missing[0]} is missing: {INDEX} lists it"
                + (f" and {len(missing) - 1} more that are missing" if missing[1:] else "")
            )
        return names
    if (folder / SINGLE).is_file():
        return [SINGLE]
    for pattern in PICKLED:
        for path in sorted(folder.glob(pattern)):
            raise ConversionError(
                f"{path}: the folder has no {SINGLE}, and pickled weights are never loaded:"
                " save them as safetensors"
            )
    return None


def folder_tensors(folder: Path) -> dict[str, Place]:
    """Every tensor of the folder's safetensors files by key."""
    names = weight_files(folder)
    if names is None:
        raise ConversionError(f"{folder}: no {SINGLE} and no {INDEX}")
    found: dict[str, Place] = {}
    for name in names:
        for key, stored in read_header(folder / name).items():
            if key in found:
                raise ConversionError(f"{folder}: {key} lies in {found[key].file} and in {name}")
            found[key] = Place(file=name, key=key, stored=stored)
    if (folder / INDEX).is_file():
        table = read_json(folder / INDEX)["weight_map"]
        for key in sorted(set(table) ^ set(found)):
            where = "no file holds it" if key in table else f"{found[key].file} holds it"
            raise ConversionError(f"{folder / INDEX}: {key}: {where}, the index says otherwise")
        for key, place in found.items():
            if table[key] != place.file:
                raise ConversionError(f"{folder / INDEX}: {key} lies in {place.file}")
    return found


def folder_index(folder: Path, family: Family, shapes: Shapes) -> FolderIndex:
    """Where each of our parameters lies in the folder.

    ``shapes`` are those of our model, a tied head left out.  Raises ConversionError, in one line,
    for what is missing, of another shape, left over, or there twice.
    """
    tensors = folder_tensors(folder)
    used: Counter[str] = Counter()
    index: TensorIndex = {}
    missing = []
    for ours, shape in shapes.items():
        place = _place(folder, ours, shape, family, tensors)
        if place is None and ours == EMBEDDING and HEAD not in shapes and HEAD in tensors:
            place = tensors[HEAD], None  # tied, and stored under the head's name alone
        if place is None:
            missing.append(ours)
            continue
        found, view = place
        used[found.key] += math.prod(shape)
        index[ours] = _entry(folder, ours, shape, found, view)
    if missing == [HEAD]:
        raise ConversionError(
            f"{folder}: tie_word_embeddings is false, and no file holds {HEAD}: set it to true in"
            " config.json if the head is the token table"
        )
    if missing:
        raise ConversionError(f"{folder} holds nothing for {listed(missing)}")
    named = _rest(folder, shapes, tensors, used, index)
    return FolderIndex(index=index, named=tuple(named))


def _place(
    folder: Path, ours: str, shape: tuple[int, ...], family: Family, tensors: Mapping[str, Place]
) -> tuple[Place, View | None] | None:
    """The one tensor that holds a parameter of ours, and as which part."""
    found = {}
    for names in family.names:
        theirs, name, expert = spelled(ours, names)
        if theirs in tensors:
            found[theirs] = (tensors[theirs], part_view(name, expert, shape))
    if len(found) > 1:
        raise ConversionError(f"{folder}: {ours} is there twice, as {' and '.join(sorted(found))}")
    return next(iter(found.values()), None)


_SLOTS = {"N": r"(?P<N>.*)", "L": r"(?P<L>\d+)", "E": r"(?P<E>\d+)", "B": r"(?P<B>weight|bias)"}


def spelled(ours: str, names: tuple[Name, ...]) -> tuple[str, Name, int | None]:
    """Their name of a parameter, by which rule, and the expert's number.  Raises KeyError for a
    parameter that the family does not have.
    """
    for name in names:
        pattern = re.escape(name.ours)
        for slot, form in _SLOTS.items():
            pattern = pattern.replace(rf"\{{{slot}\}}", form)
        match = re.fullmatch(pattern, ours)
        if match is not None:
            parts = match.groupdict()
            theirs = name.theirs
            for slot, text in parts.items():
                theirs = theirs.replace(f"{{{slot}}}", text)
            return theirs, name, int(parts["E"]) if "E" in parts else None
    raise KeyError(ours)


def part_view(name: Name, expert: int | None, shape: tuple[int, ...]) -> View | None:
    """How a parameter of ``shape`` lies in the tensor of its rule; None: as it is."""
    if name.part == (0, 1) and not name.transpose and not name.fused:
        return None
    return View(
        lead=expert if name.fused else None,
        start=name.part[0] * shape[0],
        transpose=name.transpose,
    )


def viewed_shape(stored: tuple[int, ...], view: View | None) -> tuple[int, ...] | None:
    """The shape of all rows that a view sees in a tensor; None where it has too few dims."""
    if view is None:
        return stored
    if view.lead is not None:
        if len(stored) != 3 or view.lead >= stored[0]:
            return None
        stored = stored[1:]
    return stored[::-1] if view.transpose else stored


def _entry(
    folder: Path, ours: str, shape: tuple[int, ...], place: Place, view: View | None
) -> TensorEntry:
    stored = place.stored
    dtype = DTYPES.get(stored.dtype)
    if dtype is None or not dtype.is_floating_point:
        raise ConversionError(
            f"{folder / place.file}: {place.key} is {stored.dtype}: weights are F64, F32, F16 or"
            " BF16 here"
        )
    seen = viewed_shape(stored.shape, view)
    rows = 0 if view is None else view.start
    fits = seen is not None and len(seen) == len(shape) and seen[1:] == shape[1:]
    fits = fits and (seen == shape if view is None else rows + shape[0] <= seen[0])
    if not fits:
        raise ConversionError(
            f"{folder / place.file}: {place.key} has shape {list(stored.shape)}, which does not"
            f" fit {ours} {list(shape)} of the model that config.json describes"
        )
    whole = Chunk((0,) * len(shape), shape)
    piece = Piece(chunk=whole, file=place.file, key=place.key, view=view)
    return TensorEntry(shape=shape, dtype=dtype, pieces=(piece,))


def _rest(
    folder: Path,
    shapes: Shapes,
    tensors: Mapping[str, Place],
    used: Mapping[str, int],
    index: TensorIndex,
) -> list[str]:
    """What no parameter of ours takes, with the reason why that is right."""
    named, left = [], []
    for key, place in tensors.items():
        if key in used:
            if used[key] != math.prod(place.stored.shape):
                left.append(f"{key} (a part of it)")
        elif any(re.fullmatch(form, key) for form in STORED_BUFFERS):
            named.append(f"{key}: a buffer that our model computes")
        elif key == HEAD and HEAD not in shapes:
            _compare_tied(folder, place, index[EMBEDDING])
            named.append(f"{key}: equal to the token table, to which it is tied")
        else:
            left.append(key)
    if left:
        raise ConversionError(f"{folder} holds {listed(left)}, which the model has no place for")
    return named


def _compare_tied(folder: Path, head: Place, table: TensorEntry) -> None:
    """Raise ConversionError unless the stored head is the table bit for bit, block by block."""
    other = _entry(folder, HEAD, table.shape, head, None)
    reader = Reader(folder)
    if not reader.equal(table, other):
        raise ConversionError(
            f"{folder}: tie_word_embeddings is true, and {HEAD} is another table than"
            f" {table.pieces[0].key}: set it to false in config.json if the head is its own"
        )
