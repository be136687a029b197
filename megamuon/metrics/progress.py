"""A live line on the terminal: iteration, loss, tokens/s, time left.

Owns one line of a terminal. Invariant: where the stream is no terminal nothing is written in mode
``auto``, so log files stay clean; a line that is printed through ``write`` never mixes with the
live one. Tested by ``tests/metrics/test_progress.py``.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from megamuon.console import write_line, write_text

MODES = ("auto", "on", "off")
MINIMUM_SECONDS = 0.1  # between two redraws: a terminal over a slow link must not slow training
ERASE = "\r\x1b[2K"


class ProgressDisplay:
    """``total`` iterations, of which ``done`` are behind us at the start (a resumed run)."""

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        mode: str = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"--progress is {mode!r}: choose one of {', '.join(MODES)}")
        self._stream = sys.stderr if stream is None else stream
        terminal = self._stream is not None and self._stream.isatty()
        self.enabled = mode == "on" or (mode == "auto" and terminal)
        self._total = total
        self._first = done
        self._clock = clock
        self._columns = columns
        self._started = clock()
        self._drawn = float("-inf")
        self._text = ""

    def update(self, iteration: int, loss: float | None, tokens_per_second: float) -> None:
        """Show that ``iteration`` is complete; cheap enough for every step."""
        if not self.enabled:
            return
        now = self._clock()
        if now - self._drawn < MINIMUM_SECONDS and iteration < self._total:
            return
        self._drawn = now
        ran = max(1, iteration - self._first)
        left = (now - self._started) / ran * max(0, self._total - iteration)
        parts = [f"iteration {iteration}/{self._total}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        parts += [f"{tokens_per_second:,.0f} tokens/s", f"{duration(left)} left"]
        self._text = " | ".join(parts)
        self._draw()

    def write(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line above the live one (log lines go to standard output)."""
        self._erase()
        write_line(text, sys.stdout if stream is None else stream)
        self._draw()

    def close(self) -> None:
        """Remove the live line for good."""
        self._erase()
        self.enabled = False

    def _draw(self) -> None:
        if self.enabled and self._text:
            write_text(ERASE + self._text[: max(10, self._columns() - 1)], self._stream)

    def _erase(self) -> None:
        if self.enabled and self._text:
            write_text(ERASE, self._stream)


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = int(seconds + 0.5)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
