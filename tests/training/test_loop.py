"""Whole runs on one rank: log lines, scalars, evaluation, exits, bad steps."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamuon.training import exits
from tests.support.training import LOG_LINE, Recorded, documents, flags, train


def test_log_lines_validation_blocks_and_scalars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(
        train_iters=5,
        global_batch_size=4,
        log_interval=2,
        eval_interval=3,
        log_throughput=True,
        log_params_norm=True,
        log_num_zeros_in_grad=True,
        timing_log_level=2,
        log_timers_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        log_world_size_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        tensorboard_dir=tmp_path / "tb",
        save=tmp_path / "ck",
        save_interval=2,
        log_progress=True,
    )
    step = Recorded()
    assert train(words, step) == 0
    text = capsys.readouterr().out
    lines = {int(m["iteration"]): m for m in LOG_LINE.finditer(text)}
    assert list(lines) == [1, 2, 4]  # the first is always printed
    assert [int(lines[n]["consumed"]) for n in lines] == [4, 8, 16]
    # The first line resets nothing: line 2 averages both iterations, each over two micro-batches.
    means = [sum(step.losses[2 * i : 2 * i + 2]) / 2 for i in range(5)]
    assert float(lines[2]["loss"]) == pytest.approx((means[0] + means[1]) / 2, rel=1e-5)
    assert float(lines[4]["loss"]) == pytest.approx((means[2] + means[3]) / 2, rel=1e-5)
    assert "params norm: " in lines[1].group()
    assert "num zeros: " in lines[1].group()
    assert " validation loss at iteration 3 | lm loss value: " in text
    assert " validation loss at iteration 5 on validation set | " in text
    assert " validation loss at iteration 5 on test set | " in text
    assert "[Rank 0] (after 1 iterations) memory (MB) | " in text
    assert "[Rank 0] (after 2 iterations) memory (MB) | " in text
    assert "    forward-backward ...." in text
    assert "optimizer muon | momentum 0.95 (sgd, nesterov) | scale spectral x 0.2" in text
    assert "routing of parameters:" in text
    assert "ownership plan " in text
    assert f"saving checkpoint at iteration       5 to {tmp_path / 'ck'} in" in text
    assert "  successfully saved checkpoint from iteration       2 to" in text
    assert json.loads((tmp_path / "ck" / "config.json").read_text())["training"]["seed"] == 1234
    assert (tmp_path / "tb" / "config.json").exists()
    progress = (tmp_path / "ck" / "progress.txt").read_text()
    assert "\tStarting job\n" in progress
    assert "\tSaved checkpoint\tIteration: 5\n" in progress
    names = scalar_names(tmp_path / "tb")
    wanted = {
        *("learning-rate", "learning-rate vs samples", "batch-size", "lm loss", "grad-norm"),
        *("lm loss vs samples", "loss-scale", "world-size", "params-norm", "iteration-time"),
        *("throughput", "lm loss validation", "lm loss validation ppl", "optimizer-time"),
        "mem-allocated-bytes",
    }
    assert wanted <= names, wanted - names


def scalar_names(directory: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory))
    reader.Reload()
    return set(reader.Tags()["scalars"])


def test_evaluation_goes_on_where_it_stopped_and_survives_a_resume(tmp_path: Path) -> None:
    shared = {"eval_interval": 2, "save": tmp_path, "save_interval": 3, "eval_iters": 1}
    whole, first, second = Recorded(), Recorded(), Recorded()
    assert train(flags(**{**shared, "save": tmp_path / "whole"}), whole) == 0
    assert train(flags(**shared, exit_interval=3), first) == 0
    assert train(flags(**shared, load=tmp_path), second) == 0
    cut = documents(tmp_path, 3)["counters"]
    assert cut["consumed_valid_samples"] == 2
    assert cut["consumed_train_samples"] == 6
    # Evaluations at 2, 4 and 6, and validation and test at the end.
    assert len(whole.first_tokens[False]) == 5
    assert first.first_tokens[False] + second.first_tokens[False] == whole.first_tokens[False]
    assert len(set(whole.first_tokens[False][:4])) == 4
    assert first.first_tokens[True] + second.first_tokens[True] == whole.first_tokens[True]


def test_start_eval_at_iter(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(flags(eval_interval=1, start_eval_at_iter=5, train_iters=6)) == 0
    text = capsys.readouterr().out
    assert [n for n in range(1, 7) if f"validation loss at iteration {n} |" in text] == [5, 6]


def test_skipped_iterations_consume_data_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, skipping = Recorded(), Recorded()
    assert train(flags(train_iters=4), plain) == 0
    capsys.readouterr()
    words = flags(train_iters=4, iterations_to_skip=[2], save=tmp_path, save_interval=4)
    assert train(words, skipping) == 0
    text = capsys.readouterr().out
    kept = [plain.first_tokens[True][index] for index in (0, 2, 3)]
    assert skipping.first_tokens[True] == kept
    assert "iteration 2 skipped: its data was consumed without training" in text
    last = list(LOG_LINE.finditer(text))[-1]
    assert (last["consumed"], last["skipped_samples"]) == ("8", "2")
    counters = documents(tmp_path, 4)
    assert counters["counters"]["skipped_train_samples"] == 2
    assert counters["schedule"]["num_steps"] == 6  # three steps were taken


def nan_gradient(call: int, training: bool, losses: Tensor) -> Tensor:
    """A finite loss whose gradient is not, in call 2."""
    if training and call == 2:
        losses = losses + 0.0
        losses.register_hook(lambda gradient: gradient * math.nan)
    return losses


def nan_loss(call: int, training: bool, losses: Tensor) -> Tensor:
    return losses * math.nan if training and call == 2 else losses


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(flags(train_iters=3, lr_warmup_iters=2), Recorded(nan_gradient)) == 0
    text = capsys.readouterr().out
    assert "iteration 2 skipped: gradients are not finite in " in text
    assert "model.layers.0." in text.split("gradients are not finite in ")[1].splitlines()[0]
    lines = list(LOG_LINE.finditer(text))
    assert [(line["skipped"], line["nan"]) for line in lines] == [
        ("0", "0"),
        ("1", "0"),
        ("0", "0"),
    ]
    assert lines[1]["norm"] == "nan"
    assert lines[0]["lr"] == lines[1]["lr"] != lines[2]["lr"]  # the schedule did not move


def test_a_loss_that_is_not_finite_skips_the_step_before_the_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(train_iters=2, save=tmp_path / "a", save_interval=1)
    assert train(words, Recorded(nan_loss)) == 0
    text = capsys.readouterr().out
    assert "iteration 2 skipped: loss is not finite on 1 of 1 ranks (lm loss nan; all weig" in text
    assert list(LOG_LINE.finditer(text))[-1]["nan"] == "1"
    from tests.support.training import same_bits, stored_tensors

    assert same_bits(stored_tensors(tmp_path / "a", 1), stored_tensors(tmp_path / "a", 2)) == []
    assert documents(tmp_path / "a", 2)["schedule"]["num_steps"] == 2


def test_too_many_skipped_steps_in_a_row_end_the_run_and_keep_what_was_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that ruins the weights in one step, after two good ones."""
    shared = {"eval_iters": 0, "save": tmp_path, "save_interval": 1, "train_iters": 40}
    shared |= {"save_retain_interval": 100, "clip_grad": 0}
    assert train(flags(**shared, exit_interval=2)) == 0
    ruin = flags(**{**shared, "lr": 1e18}, load=tmp_path, max_skipped_iterations=5)
    ruin += ["--override-opt_param-scheduler"]
    capsys.readouterr()
    assert train(ruin) == 1
    said = capsys.readouterr()
    (error,) = said.err.splitlines()
    assert error.startswith("error: 5 iterations in a row were skipped (--max-skipped-iterations 5")
    assert f"the last good checkpoint is iteration 2 in {tmp_path} (--ckpt-step" in error
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000007"]  # the ruined one of the last save, and the good
    lines = list(LOG_LINE.finditer(said.out))
    assert len(lines) == 6  # one step was made
    totals = [line.group().partition("skipped so far: ")[2][:1] for line in lines]
    assert totals == ["", "1", "2", "3", "4", "5"]
    assert documents(tmp_path, 7)["counters"]["skipped_in_a_row"] == 4
    # A new launch goes on counting, and still knows the good one.
    assert train(ruin) == 1
    assert "5 iterations in a row" in (again := capsys.readouterr().err)
    assert f"the last good checkpoint is iteration 2 in {tmp_path}" in again


def test_a_run_that_ends_in_skipped_steps_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(lr=1e18, clip_grad=0, train_iters=6, save=tmp_path, save_interval=2)
    assert train(words) == 1
    error = capsys.readouterr().err
    assert "error: the run ends at iteration 6 after 5 skipped iterations in a row." in error
    assert "no checkpoint of this run is known to be good" in error


def test_an_evaluation_that_is_not_finite_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(call: int, training: bool, losses: Tensor) -> Tensor:
        return losses if training else losses * math.nan

    assert train(flags(train_iters=2, eval_interval=1, eval_iters=1), Recorded(broken)) == 0
    text = capsys.readouterr().out
    assert "WARNING: validation at iteration 1: lm loss nan is not finite (1 such" in text
    assert "(4 such evaluations so far)" in text  # two, and validation and test at the end


def test_a_progress_file_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "progress.txt").mkdir()
    words = flags(train_iters=2, eval_iters=0, save=tmp_path, save_interval=2, log_progress=True)
    assert train(words) == 0
    text = capsys.readouterr().out
    assert text.count("WARNING: --log-progress: [Errno 21]") == 2
    assert documents(tmp_path, 2)["counters"]["failed_saves"] == 0


def test_accumulation_once_per_step_equals_every_micro_batch() -> None:
    each, once = Recorded(), Recorded()
    shared = {"global_batch_size": 6, "fp64": True, "train_iters": 4, "eval_iters": 0}
    assert train(flags(**shared), each) == 0
    assert train(flags(**shared, gradient_reduction="step"), once) == 0
    torch.testing.assert_close(
        torch.tensor(each.losses), torch.tensor(once.losses), rtol=1e-9, atol=0
    )


def test_exit_interval_saves_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(flags(exit_interval=4, save=tmp_path, save_interval=100)) == 0
    text = capsys.readouterr().out
    assert "exiting program at iteration 4" in text
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert "on validation set" not in text


def test_exit_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(flags(exit_duration_in_mins=0, save=tmp_path, save_interval=100)) == 0
    assert "exiting program after 0." in capsys.readouterr().out
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.parametrize("training", [True, False])
def test_a_signal_saves_and_leaves_with_code_0(
    training: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exits, "POLL_SECONDS", 0.0)  # after every micro-batch

    def interrupt(call: int, in_training: bool, losses: Tensor) -> Tensor:
        if in_training is training and call == (3 if training else 1):
            os.kill(os.getpid(), signal.SIGTERM)  # in the middle of an accumulation, or evaluation
        return losses

    before = signal.getsignal(signal.SIGTERM)
    words = flags(
        global_batch_size=4,
        eval_interval=2,
        exit_signal_handler=True,
        save=tmp_path,
        save_interval=100,
        eval_iters=3,
        gradient_reduction="step",
    )
    step = Recorded(interrupt)
    assert train(words, step) == 0
    text = capsys.readouterr().out
    assert "exiting program after receiving SIGTERM." in text
    tracked = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    assert tracked == ("1" if training else "2")
    assert ("iteration 2 was cut short and dropped" in text) == training
    # Two micro-batches make a batch; what came after the signal was left out.
    assert step.calls[True] == (3 if training else 4)
    assert step.calls[False] == (0 if training else 1)
    if not training:
        assert "validation at iteration 2 was cut short" in text
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_dropped_step_is_made_from_its_start_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "POLL_SECONDS", 0.0)

    def interrupt(call: int, training: bool, losses: Tensor) -> Tensor:
        if call == 8:  # the second of three micro-batches of iteration 3
            os.kill(os.getpid(), signal.SIGTERM)
        return losses

    shared = {"global_batch_size": 6, "train_iters": 4, "hidden_dropout": 0.1, "eval_iters": 0}
    shared |= {"exit_signal_handler": True}
    whole, first, second = Recorded(), Recorded(interrupt), Recorded()
    assert train(flags(**shared), whole) == 0
    saved = {"save": tmp_path, "load": tmp_path, "save_interval": 100}
    assert train(flags(**shared, **saved), first) == 0
    assert len(first.losses) == 8
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert train(flags(**shared, **saved), second) == 0
    assert first.losses[:6] + second.losses == whole.losses
    assert first.first_tokens[True][:6] + second.first_tokens[True] == whole.first_tokens[True]


def test_skip_train_evaluates_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(flags(train_iters=2, save=tmp_path, save_interval=2)) == 0
    capsys.readouterr()
    assert train(flags(train_iters=None, lr=None, skip_train=True, load=tmp_path)) == 0
    text = capsys.readouterr().out
    assert " validation loss at iteration 2 on validation set | " in text
    assert not LOG_LINE.search(text)


def test_skip_train_evaluates_the_same_samples_whatever_the_checkpoint_has_seen(
    tmp_path: Path,
) -> None:
    trained, fresh, resumed = Recorded(), Recorded(), Recorded()
    words = flags(train_iters=4, eval_interval=2, save=tmp_path, save_interval=4)
    assert train(words, trained) == 0
    assert documents(tmp_path, 4)["counters"]["consumed_valid_samples"] > 0
    alone = {"train_iters": None, "lr": None, "skip_train": True}
    assert train(flags(**alone), fresh) == 0
    assert train(flags(**alone, load=tmp_path), resumed) == 0
    assert resumed.first_tokens[False] == fresh.first_tokens[False]


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for flag in ("save", "tensorboard_dir"):
        place = tmp_path / "file" / "below"
        words = flags(**{flag: place}, save_interval=2 if flag == "save" else None)
        assert train(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --{flag.replace('_', '-')} {place}: cannot be written (")


def test_documents_of_a_sample_can_be_kept_apart() -> None:
    """The mock data has ends of documents: attention that stops there changes the loss."""
    runs = []
    for changes in ({}, {"reset_position_ids": True, "reset_attention_mask": True}):
        step = Recorded(reset_positions=bool(changes))
        words = flags(**changes, seq_length=512, train_iters=2, eval_iters=0)
        assert train(words, step) == 0
        runs.append(step.losses)
    assert all(math.isfinite(loss) for loss in runs[1])
    assert runs[0] != runs[1]


def test_a_sample_is_printed_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    import pretrain_gpt

    words = flags(train_iters=1, eval_iters=0, sample_prompt="def", sample_tokens=3)
    assert pretrain_gpt.main(words) == 0
    assert "sample of 'def':\ndef" in capsys.readouterr().out
