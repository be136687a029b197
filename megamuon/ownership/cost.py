"""Cost sources of the planner: how long the update of a matrix takes.

Owns the three sources of milliseconds per shape: a closed form with constants from a named file, a
file of times, and measurement with a cache on disk.  A source is a function ``cost_of(rows, cols)
-> milliseconds``.  Invariant: a source answers with a finite, non-negative time or raises
CostError that names the shape and the file; it never guesses. Nothing here imports torch or talks
to other ranks; the caller passes in how to measure and how to combine. Tested by
``tests/ownership/test_cost.py``.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

Shape = tuple[int, int]
CostFunction = Callable[[int, int], float]
# Floating-point operations of products, and of eigen and QR decompositions, by rows and cols.
WorkFunction = Callable[[int, int], tuple[float, float]]

H100_CONSTANTS = Path(__file__).with_name("costs_h100.json")
_CACHE_FORMAT = 1


class CostError(ValueError):
    """A cost source has no usable time for a shape."""


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Cost by formula, for planning a device that is not here.

    milliseconds(n, m) = fixed_ms + wide_flops n^2 m / wide_flops_per_ms + square_flops n^3 /
    square_flops_per_ms with n <= m: a launch floor, the two products with the whole matrix (Gram
    matrix, final product), and the iteration on the n x n Gram matrix.
    """

    fixed_ms: float
    wide_flops: float
    wide_flops_per_ms: float
    square_flops: float
    square_flops_per_ms: float

    def __call__(self, rows: int, cols: int) -> float:
        """Milliseconds for a [rows, cols] matrix; the order of the two does not matter."""
        n, m = sorted((rows, cols))
        wide = self.wide_flops * n * n * m / self.wide_flops_per_ms
        return self.fixed_ms + wide + self.square_flops * n**3 / self.square_flops_per_ms

    def of_work(self, work: WorkFunction) -> CostFunction:
        """The cost of another update than Newton-Schulz, with the same launch floor and rates.
        Decompositions count at the rate of square products, which flatters them: what the planner
        needs is how they grow from one shape to the next.
        """

        def milliseconds(rows: int, cols: int) -> float:
            products, factorizations = work(rows, cols)
            square = factorizations / self.square_flops_per_ms
            return self.fixed_ms + products / self.wide_flops_per_ms + square

        return milliseconds


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Cost by look-up: milliseconds per shape."""

    times: Mapping[Shape, float]
    source: str  # where the times come from, for messages

    def __call__(self, rows: int, cols: int) -> float:
        """Milliseconds for a [rows, cols] matrix.  Raises CostError for a shape not listed."""
        try:
            return self.times[rows, cols]
        except KeyError:
            raise CostError(
                f"{self.source} has no Newton-Schulz time for shape [{rows}, {cols}]"
            ) from None

    def require(self, shapes: Iterable[Shape]) -> None:
        """Raise one CostError that lists every shape of ``shapes`` that the table lacks."""
        missing = sorted(set(shapes) - set(self.times))
        if missing:
            listed = ", ".join(f"[{rows}, {cols}]" for rows, cols in missing)
            raise CostError(
                f"{self.source} has no Newton-Schulz time for {len(missing)} shape(s): {listed};"
                " add entries [[rows, cols], milliseconds] (--ns-cost-file)"
            )


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostError(f"cannot read the cost file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CostError(f"the cost file {path} is not valid JSON: {error}") from error


def closed_form_cost(path: str | Path | None = None) -> ClosedForm:
    """The closed form with the constants of a JSON file; by default H100_CONSTANTS.

    Raises CostError that names the file and the constant that is missing or not a positive number.
    """
    path = H100_CONSTANTS if path is None else Path(path)
    content = _read_json(path)
    if not isinstance(content, dict):
        raise CostError(
            f"{path} must hold a JSON object of constants, found a {type(content).__name__}"
        )
    constants: dict[str, float] = {}
    for field in fields(ClosedForm):
        value = content.get(field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CostError(
                f"{path}: constant {field.name} must be a positive number, found {value!r}"
            )
        constants[field.name] = float(value)
    return ClosedForm(**constants)


def _parse_times(entries: object, source: str) -> dict[Shape, float]:
    """Times of a list of ``[[rows, cols], milliseconds]``."""
    if not isinstance(entries, list):
        raise CostError(f"{source} must hold a list of [[rows, cols], milliseconds]")
    times: dict[Shape, float] = {}
    for index, entry in enumerate(entries):
        try:
            (rows, cols), value = entry
            shape, time = (int(rows), int(cols)), float(value)
        except (TypeError, ValueError):
            raise CostError(
                f"{source}, entry {index}: expected [[rows, cols], milliseconds], found {entry!r}"
            ) from None
        if not (math.isfinite(time) and time >= 0) or min(shape) < 1:
            raise CostError(f"{source}, entry {index}: {entry!r} is no time of a matrix")
        if times.setdefault(shape, time) != time:
            raise CostError(
                f"{source}, entry {index}: shape {list(shape)} also has {times[shape]} ms"
            )
    return times


def file_cost(path: str | Path, shapes: Iterable[Shape] = ()) -> CostTable:
    """Times from a JSON file, a list of ``[[rows, cols], milliseconds]``.

    With ``shapes``, raises one CostError that lists all of them that the file lacks.
    """
    path = Path(path)
    table = CostTable(times=_parse_times(_read_json(path), str(path)), source=str(path))
    table.require(shapes)
    return table


@dataclass(frozen=True, kw_only=True)
class CostKey:
    """What a measured time depends on besides the shape."""

    device: str  # device name, e.g. as the driver reports it
    newton_schulz: str  # the configuration of what was timed: Newton-Schulz's, or the optimizer's
    torch_version: str


def measured_costs(
    shapes: Iterable[Shape],
    *,
    measure: Callable[[Shape], float],
    key: CostKey,
    cache_path: str | Path | None = None,
    combine: Callable[[list[float]], list[float]] | None = None,
) -> CostTable:
    """Measure Newton-Schulz once per shape, or take the times of an earlier run from the cache.

    ``measure((rows, cols))`` returns milliseconds on this rank.  ``combine`` maps this rank's list
    of times, one per distinct shape in sorted order, to the list that all ranks share (the median
    over ranks, DMuon-2 appendix B).  It is called exactly once on every rank, whatever the caches
    hold, so it may be a collective.  The combined times are stored at ``cache_path`` under
    ``key``.  Raises CostError on a time that is not finite or negative.
    """
    wanted = sorted(set(shapes))
    path = None if cache_path is None else Path(cache_path)
    known = {} if path is None else _cached_times(path, key)
    own = [known[shape] if shape in known else float(measure(shape)) for shape in wanted]
    shared = own if combine is None else [float(time) for time in combine(own)]
    if len(shared) != len(wanted):
        raise CostError(f"combining {len(wanted)} Newton-Schulz times returned {len(shared)}")
    for shape, time in zip(wanted, shared, strict=True):
        if not (math.isfinite(time) and time >= 0):
            raise CostError(
                f"measured Newton-Schulz time of shape {list(shape)} on {key.device} is {time} ms"
            )
    times = dict(zip(wanted, shared, strict=True))
    if path is not None and any(known.get(shape) != time for shape, time in times.items()):
        try:
            _store_times(path, key, {**known, **times})
        except OSError as error:  # a cache that cannot be written costs time, not the run
            message = f"cannot write the Newton-Schulz time cache {path}: {error}"
            warnings.warn(message, stacklevel=2)
    return CostTable(times=times, source=f"measurement on {key.device}")


def _cache_entries(path: Path) -> list[dict[str, object]]:
    """Entries of a cache file; a cache that cannot be used counts as empty and says so."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == _CACHE_FORMAT and all(
            "milliseconds" in entry for entry in content["entries"]
        ):
            return list(content["entries"])
        reason = f"format {content['format']!r}, expected {_CACHE_FORMAT}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    # Raising would stop this rank alone and leave the others waiting in ``combine``.
    warnings.warn(f"the Newton-Schulz time cache {path} is measured anew ({reason})", stacklevel=4)
    return []


def _same_key(entry: Mapping[str, object], key: CostKey) -> bool:
    return all(entry.get(name) == value for name, value in asdict(key).items())


def _cached_times(path: Path, key: CostKey) -> dict[Shape, float]:
    times: dict[Shape, float] = {}
    for entry in _cache_entries(path):
        if not _same_key(entry, key):
            continue
        try:
            times.update(_parse_times(entry["milliseconds"], str(path)))
        except CostError as error:
            warnings.warn(f"the Newton-Schulz time cache is measured anew ({error})", stacklevel=3)
    return times


def _store_times(path: Path, key: CostKey, times: Mapping[Shape, float]) -> None:
    """Replace the entry of ``key``.  Ranks may write at once: each write is whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading has already said what is wrong with the file
        entries = [entry for entry in _cache_entries(path) if not _same_key(entry, key)]
    listed: Sequence[object] = [[list(shape), time] for shape, time in sorted(times.items())]
    entries.append({**asdict(key), "milliseconds": listed})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _CACHE_FORMAT, "entries": entries}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
