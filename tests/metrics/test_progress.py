"""The live line: on a terminal only, one line, throttled."""

from __future__ import annotations

import io

import pytest

from megamuon.metrics.progress import ERASE, ProgressDisplay, duration, write_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_shows_iteration_loss_speed_and_time_left() -> None:
    stream, clock = Terminal(), Clock()
    display = ProgressDisplay(100, done=10, stream=stream, clock=clock, columns=lambda: 80)
    clock.now = 20.0
    display.update(20, 1.23456, 2048.4)  # 10 iterations in 20 s: 80 more take 160 s
    assert (
        stream.getvalue() == ERASE + "iteration 20/100 | loss 1.2346 | 2,048 tokens/s | 2:40 left"
    )


def test_redraws_are_throttled_but_the_last_is_shown() -> None:
    stream, clock = Terminal(), Clock()
    display = ProgressDisplay(3, stream=stream, clock=clock, columns=lambda: 80)
    for iteration in (1, 2, 3):
        display.update(iteration, None, 1.0)
    shown = stream.getvalue()
    assert "1/3" in shown
    assert "2/3" not in shown
    assert "3/3" in shown


def test_no_terminal_no_output_unless_forced() -> None:
    for mode, expected in (("auto", False), ("off", False), ("on", True)):
        stream = io.StringIO()
        ProgressDisplay(3, mode=mode, stream=stream).update(1, 1.0, 1.0)
        assert bool(stream.getvalue()) is expected
    stream = Terminal()
    ProgressDisplay(3, mode="off", stream=stream).update(1, 1.0, 1.0)
    assert stream.getvalue() == ""


def test_a_log_line_does_not_mix_with_the_live_one() -> None:
    terminal = Terminal()
    display = ProgressDisplay(9, stream=terminal, columns=lambda: 80)
    display.update(1, 1.0, 1.0)
    live = terminal.getvalue()
    display.write("a log line", terminal)
    assert terminal.getvalue() == f"{live}{ERASE}a log line\n{live}"
    display.close()
    assert terminal.getvalue().endswith(ERASE)
    display.update(2, 1.0, 1.0)
    assert terminal.getvalue().endswith(ERASE)


def test_the_line_never_wraps() -> None:
    stream = Terminal()
    ProgressDisplay(9, stream=stream, columns=lambda: 20).update(1, 1.0, 1.0)
    assert len(stream.getvalue()) - len(ERASE) == 19


def test_modes_and_durations() -> None:
    with pytest.raises(ValueError, match="--progress is 'maybe'"):
        ProgressDisplay(1, mode="maybe")
    assert [duration(value) for value in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def test_a_line_reaches_the_log_in_one_piece() -> None:
    pieces: list[str] = []

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    write_line("iteration 1", Log())
    assert pieces == ["iteration 1\n"]
