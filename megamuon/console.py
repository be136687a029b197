"""Printing that survives a closed pipe or a full disk.

Owns what happens to text that a console does not take: characters outside its encoding are written
as escapes; a console that is gone (a closed pipe, a closed descriptor, a full disk behind the log)
loses the text, and the work goes on. Invariants: nothing in here raises for a stream; nothing is
changed but by ``forgive_console``, which entry scripts and tools call. Tested by
``tests/test_console.py``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)


def write_line(text: str, stream: Any) -> None:
    """Write a whole line at once, or lose it.

    Ranks share a log. ``print`` hands text and line break over apart, and where standard output is
    unbuffered another rank's line can come between them.
    """
    write_text(f"{text}\n", stream)


def write_text(text: str, stream: Any) -> None:
    """Write and flush, or lose the text; ``stream`` may be None, as it is where Python started
    with a closed descriptor.
    """
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(escaped(text, stream))
        stream.flush()
    except OSError as error:
        _retire(stream, error)
    except ValueError:  # closed by somebody
        return


def escaped(text: str, stream: Any) -> str:
    """``text`` with escapes for the characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


class ForgivingStream:
    """A text stream like the one inside, whose ``write`` and ``flush`` never raise for it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        """Write, with escapes where need be, or lose the text."""
        try:
            try:
                self._inner.write(text)
            except UnicodeEncodeError:
                self._inner.write(escaped(text, self._inner))
        except OSError as error:
            _retire(self._inner, error)
        except ValueError:
            pass
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or lose what was left."""
        try:
            self._inner.flush()
        except OSError as error:
            _retire(self._inner, error)
        except ValueError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Any:
        return iter(self._inner)


def forgive_console() -> None:
    """From now on ``print``, warnings and progress bars of this process cannot raise for the
    console either.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, ForgivingStream):
            setattr(sys, name, ForgivingStream(stream))


def run_script(main: Callable[[], int | None]) -> int:
    """The exit code of a script's or tool's ``main``, on a console that forgives.

    A reader that leaves early (``| head``) costs the rest of the text alone: files are written, and
    the exit code is that of the work.
    """
    forgive_console()
    try:
        return main() or 0
    except KeyboardInterrupt:
        write_line("interrupted", sys.stderr)
        return INTERRUPTED
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()


def _retire(stream: Any, error: OSError) -> None:
    """Give a stream whose reader is gone somewhere to write to: what is left in its buffer would be
    an error at the end of Python. A full disk may have room again.
    """
    if error.errno not in _GONE:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
