"""What a failure says."""

from __future__ import annotations

import pytest

from megamuon.checkpoint import CheckpointError
from megamuon.collectives import CollectiveError
from megamuon.training.failures import Phase, TrainingError, describe, report


def phase(name: str = "backward", iteration: int = 7) -> Phase:
    made = Phase(rank=1)
    made(name, iteration)
    return made


def test_known_errors_need_no_traceback() -> None:
    for error in (TrainingError("no set"), CheckpointError("bad file")):
        assert describe(error, phase()) == (f"error: {error}", False)


def test_a_lost_peer_names_rank_phase_and_iteration() -> None:
    error = RuntimeError("[..] Connection closed by peer [127.0.0.1]:4242")
    line, unknown = describe(error, phase())
    assert line.startswith(
        "rank 1 lost contact with the other ranks during backward of iteration 7: "
    )
    assert not unknown


def test_a_rank_that_the_operators_miss_is_named_once() -> None:
    error = CollectiveError(
        "gather failed: gather: call 6: lost contact: rank 2 gave up: rank 1 died while rank 2"
        " stood at gather of group 'layers.3', call 6: waits for rank 1 to finish"
    )
    assert describe(error, phase()) == (
        "rank 1 lost contact with the other ranks during backward of iteration 7: gather failed:"
        " gather: call 6: rank 2 gave up: rank 1 died while rank 2 stood at gather of group"
        " 'layers.3', call 6: waits for rank 1 to finish",
        False,
    )


def test_input_errors_are_the_users_only_while_input_is_read() -> None:
    error = ValueError("corpus.bin: token 300 of sample 3")
    assert describe(error, phase("reading a batch"))[1] is False
    line, unknown = describe(error, phase("forward"))
    assert unknown
    assert line.startswith("rank 1 failed during forward of iteration 7: ValueError: corpus.bin")


def test_tracebacks_for_unknown_errors_and_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGAMUON_TRACEBACK", raising=False)
    report(TrainingError("plain"), phase())
    assert capsys.readouterr().err == "error: plain\n"
    report(TrainingError("plain"), phase(), debug=True)
    assert "TrainingError: plain" in capsys.readouterr().err
    monkeypatch.setenv("MEGAMUON_TRACEBACK", "1")
    report(TrainingError("plain"), phase())
    assert "TrainingError: plain" in capsys.readouterr().err
    monkeypatch.setenv("MEGAMUON_TRACEBACK", "0")
    report(KeyError("x"), phase())
    assert "KeyError" in capsys.readouterr().err
