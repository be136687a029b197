"""Which checkpoint a run starts from, and with what."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamuon.arguments import parse_config
from megamuon.checkpoint import Ranks
from megamuon.mesh import Mesh
from megamuon.models import PRESETS
from megamuon.ownership import OwnershipPlan
from megamuon.training import read_checkpoint_args
from megamuon.training.checkpointing import RunCheckpoints
from megamuon.training.failures import TrainingError
from megamuon.training.logging import Console
from megamuon.training.source import Source
from tests.support.training import (
    Recorded,
    documents,
    flags,
    same_bits,
    stored_tensors,
    train,
)

QUICK = {"eval_iters": 0, "save_interval": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert train(flags(**QUICK, train_iters=4, save=folder, global_batch_size=4)) == 0
    return folder


def test_documents_are_plain_and_complete(saved: Path) -> None:
    found = documents(saved, 4)
    assert {"args", "counters", "schedule", "plan", "rng"} <= set(found)
    assert found["counters"]["consumed_train_samples"] == 16
    assert found["counters"]["floating_point_operations"] > 0
    assert found["schedule"]["num_steps"] == 16
    assert found["args"]["model"]["num_layers"] == 3
    assert not list((saved / "iter_0000004").glob("*.pt"))


def test_a_missing_checkpoint_starts_from_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(flags(**{**QUICK, "save_interval": None}, train_iters=1, load=tmp_path)) == 0
    assert "WARNING: no checkpoint in --load" in capsys.readouterr().out


def test_finetune_takes_weights_only(saved: Path, tmp_path: Path) -> None:
    words = flags(**QUICK, train_iters=2, load=saved, finetune=True, save=tmp_path, lr=1e-30)
    assert train(words) == 0
    assert documents(tmp_path, 2)["counters"]["consumed_train_samples"] == 4
    close(stored_tensors(saved, 4), stored_tensors(tmp_path, 2))


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """The weights are those of the checkpoint, since the learning rate was nothing."""
    weights = [name for name in first if not name.startswith("optimizer.")]
    assert weights
    for name in weights:
        torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=1e-9)


def test_pretrained_checkpoint_counts_only_while_load_is_empty(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(
        **QUICK,
        train_iters=2,
        pretrained_checkpoint=saved,
        load=tmp_path,
        save=tmp_path,
        lr=1e-30,
    )
    assert train(words) == 0
    assert f" loading distributed checkpoint from {saved} at" in capsys.readouterr().out
    close(stored_tensors(saved, 4), stored_tensors(tmp_path, 2))
    longer = ["--train-iters", "4", "--override-opt_param-scheduler"]
    assert train([*words, *longer]) == 0
    assert f"loading distributed checkpoint from {tmp_path} at" in capsys.readouterr().out


def test_an_older_step_and_no_optimizer(saved: Path, tmp_path: Path) -> None:
    step = Recorded()
    words = flags(
        **QUICK,
        train_iters=4,
        global_batch_size=4,
        load=saved,
        ckpt_step=2,
        no_load_optim=True,
        no_load_rng=True,
        save=tmp_path,
    )
    assert train(words, step) == 0
    assert len(step.losses) == 4  # iterations 3 and 4
    assert documents(tmp_path, 4)["schedule"]["num_steps"] == 8  # the schedule began anew
    assert same_bits(stored_tensors(saved, 4), stored_tensors(tmp_path, 4)) != []


def test_without_optimizer_state_a_resume_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {**QUICK, "save": tmp_path, "no_save_optim": True, "no_save_rng": True}
    assert train(flags(**shared, train_iters=2)) == 0
    assert not [name for name in stored_tensors(tmp_path, 2) if name.startswith("optimizer.")]
    assert train(flags(**shared, train_iters=4, load=tmp_path)) == 1
    assert "add --no-load-optim" in capsys.readouterr().err
    assert train(flags(**shared, train_iters=4, load=tmp_path, no_load_optim=True)) == 0


@pytest.mark.parametrize(
    ("optimizer", "new", "stays"), [("adam", 21, 17), ("sgd", 38, 0), ("normuon", 21, 17)]
)
def test_another_optimizer_keeps_weights_and_what_it_reads_alike(
    optimizer: str,
    new: int,
    stays: int,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = flags(
        **{**QUICK, "save_interval": 1},
        train_iters=5,
        global_batch_size=4,
        load=saved,
        save=tmp_path,
        optimizer=optimizer,
        lr=1e-30,
    )
    assert train([*words, "--override-opt_param-scheduler"]) == 0
    text = capsys.readouterr().out
    assert f"optimizer changed from muon to {optimizer}: weights are kept" in text
    assert f"state of {new} parameters is new, that of {stays} goes on" in text
    kept, all_saved = 3 * stays, 21 + 3 * 17  # momenta, and three tensors of AdamW
    assert (
        f"filled 38 of 38 weights and {kept} optimizer tensors; {all_saved - kept} tensors of"
        " the checkpoint are not used, e.g. optimizer." in text
    )
    before, after = stored_tensors(saved, 4), stored_tensors(tmp_path, 5)
    for name in (n for n in before if not n.startswith("optimizer.")):
        torch.testing.assert_close(before[name], after[name], rtol=1e-6, atol=1e-9)
    steps = {name: float(t) for name, t in after.items() if name.startswith("optimizer.step.")}
    if stays:
        assert steps["optimizer.step.model.norm.weight"] == 5
        matrix = "optimizer.step.model.layers.0.mlp.up_proj.weight"
        assert steps.get(matrix, 1) == 1  # AdamW counts anew; NorMuon counts nothing
    assert documents(tmp_path, 5)["counters"]["iteration"] == 5


def place(rank: int, replicas: int, shards: int, tp: int) -> Mesh:
    return Mesh(
        world_size=replicas * shards * tp,
        rank=rank,
        local_rank=rank,
        replicas=replicas,
        shards=shards,
        tp=tp,
        device=torch.device("cpu"),
        backend="gloo",
    )


def test_a_stored_plan_is_for_a_grid_of_its_shape(saved: Path) -> None:
    source = Source(directory=saved, iteration=4, documents=documents(saved, 4), weights_only=False)
    assert source.plan_for(place(0, 1, 1, 1)) is source.plan is not None
    for replicas, shards, tp in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert source.plan_for(place(0, replicas, shards, tp)) is None


def test_a_plan_from_before_tensor_parallelism_is_reused(saved: Path) -> None:
    stored = documents(saved, 4)
    plan = stored["plan"]
    plan |= {"version": 1, "topology": {"rows": 1, "columns": 1}}
    for name in ("balance_gain", "workspace_growth", "workspace_cap_mib"):
        del plan["settings"][name]
    plan["settings"]["balance_columns"] = plan["settings"].pop("balance_rails")
    for parameter in plan["parameters"]:
        owned = parameter.pop("storage")["shard"][0] == "owned"
        parameter["layout"] = "owner" if owned else "even"
        del parameter["update"], parameter["gradient"]
    for unit in plan["units"]:
        unit["owner"] = 0
    old = Source(directory=saved, iteration=4, documents=stored, weights_only=False)
    new = Source(directory=saved, iteration=4, documents=documents(saved, 4), weights_only=False)
    assert old.plan == new.plan is not None
    assert old.plan_for(place(0, 1, 1, 1)) is old.plan


@pytest.mark.parametrize("change", [{"version": 3}, {"settings": {"unknown": 1}}, {"units": None}])
def test_a_plan_that_cannot_be_read_is_named_and_made_anew(
    change: dict[str, object],
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = OwnershipPlan.from_json
    monkeypatch.setattr(
        OwnershipPlan, "from_json", lambda text: read(json.dumps({**json.loads(text), **change}))
    )
    words = flags(**{**QUICK, "save_interval": None}, train_iters=5, global_batch_size=4)
    words += ["--load", str(saved), "--override-opt_param-scheduler"]
    assert train(words) == 0
    text = capsys.readouterr().out
    assert f"WARNING: the ownership plan in {saved} is not used: " in text
    assert "made now" in text
    assert "  filled 38 of 38 weights and 72 optimizer tensors\n" in text


def test_a_weight_that_no_load_filled_is_an_error(saved: Path) -> None:
    source = Source(directory=saved, iteration=4, documents=documents(saved, 4), weights_only=False)
    config = parse_config(flags(), presets=PRESETS, world_size=1).config
    mesh = place(0, 1, 1, 1)
    run = RunCheckpoints(config, mesh, Ranks(), Console(mesh))
    assert source.plan is not None
    names = tuple(p.name for p in source.plan.parameters)
    loaded = SimpleNamespace(filled=names[1:], unused=(), widened=())
    with pytest.raises(TrainingError, match=rf"1 of 38 weights not filled: {names[0]}"):
        run._report_filled(loaded, SimpleNamespace(plan=source.plan))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored_tp", "mesh", "taken"),
    [
        (1, place(3, 2, 2, 1), 3),
        (1, place(2, 1, 4, 1), 2),
        (2, place(1, 1, 2, 1), 2),  # of its place's first tensor-parallel rank
        (2, place(3, 1, 2, 2), 2),
        (1, place(5, 1, 4, 2), 2),
        (1, place(0, 1, 2, 2), "4 data-parallel ranks do not fit 2 data-parallel ranks"),
        (1, place(0, 1, 2, 1), "4 ranks do not fit 2 ranks"),
    ],
)
def test_random_states_follow_the_data_parallel_place(
    stored_tp: int,
    mesh: Mesh,
    taken: int | str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    restored: list[int] = []
    monkeypatch.setattr("megamuon.training.checkpointing.restore_rng", restored.append)
    stored = {"rng": [0, 1, 2, 3], "args": {"parallel": {"tensor_model_parallel_size": stored_tp}}}
    source = Source(directory=Path(), iteration=1, documents=stored, weights_only=False)
    config = parse_config(flags(), presets=PRESETS, world_size=1).config
    run = RunCheckpoints(config, mesh, Ranks(), Console(mesh))
    run._resume_rng(source)
    if isinstance(taken, int):
        assert restored == [taken]
    else:
        assert restored == []
        assert f"random states of {taken}: continuing with fresh" in capsys.readouterr().out


def test_an_architecture_of_the_same_shapes_and_another_meaning_is_refused(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(
        **{**QUICK, "save_interval": None}, train_iters=4, global_batch_size=4, load=saved
    )
    assert train([*words, "--apply-layernorm-1p", "--rotary-percent", "0.5"]) == 1
    text = capsys.readouterr().err
    assert "layernorm_zero_centered_gamma is False in the checkpoint and True here" in text
    assert "rotary_percent is 1.0 in the checkpoint and 0.5 here" in text


def test_schedule_modes_on_resume(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {**QUICK, "train_iters": 6, "global_batch_size": 4, "load": saved, "lr": 5e-3}
    assert train(flags(**shared, save=tmp_path / "c")) == 1
    error = capsys.readouterr().err
    assert "max_lr is 0.01 in the checkpoint and 0.005 in the configuration" in error
    over = flags(**shared, save=tmp_path / "a") + ["--override-opt_param-scheduler"]
    assert train(over) == 0
    assert documents(tmp_path / "a", 6)["schedule"]["max_lr"] == 5e-3
    stored = flags(**shared, save=tmp_path / "b") + ["--use-checkpoint-opt_param-scheduler"]
    assert train(stored) == 0
    assert documents(tmp_path / "b", 6)["schedule"]["max_lr"] == 1e-2


def test_retain_interval_and_a_failed_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(**{**QUICK, "save_interval": 1}, train_iters=3, save=tmp_path / "ck")
    assert train([*words, "--save-retain-interval", "2"]) == 0
    kept = sorted(path.name for path in (tmp_path / "ck").glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000003"]

    def block(call: int, training: bool, losses: torch.Tensor) -> torch.Tensor:
        if call == 1:  # a file where the directory of checkpoints should be
            (tmp_path / "no" / "config.json").unlink()
            (tmp_path / "no").rmdir()
            (tmp_path / "no").write_text("")
        return losses

    blocked = flags(**QUICK, train_iters=2, save=tmp_path / "no", save_failure="warn")
    assert train(blocked, Recorded(block)) == 1  # went on, and could not save its last state either
    said = capsys.readouterr()
    assert "going on (--save-failure warn; 1 in a row, 1 in all)" in said.out
    assert "error: the run ends at iteration 2 and its state could not be saved" in said.err
    (tmp_path / "no").unlink()
    many = [*blocked, "--train-iters", "9", "--save-interval", "1", "--max-failed-saves", "2"]
    assert train(many, Recorded(block)) == 1
    assert "error: 2 saves in a row have failed (--max-failed-saves)" in capsys.readouterr().err
    (tmp_path / "no").unlink()
    blocked[blocked.index("warn")] = "fatal"
    assert train(blocked, Recorded(block)) == 1


def test_checkpoint_arguments_fill_the_model(saved: Path, tmp_path: Path) -> None:
    stored = read_checkpoint_args(str(saved), None)
    assert stored is not None
    assert stored["model"]["hidden_size"] == 50
    assert read_checkpoint_args(str(tmp_path), None) is None
    words = flags(
        model=None,
        tokenizer_type=None,
        load=saved,
        use_checkpoint_args=True,
        train_iters=6,
        global_batch_size=4,
        eval_iters=0,
    )
    words += ["--owner-unit-threshold", "2000", "--override-opt_param-scheduler"]
    step = Recorded()
    assert train(words, step) == 0
    assert len(step.losses) == 4  # iterations 5 and 6


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_checkpoint_that_a_step_followed_is_kept(
    asynchronous: bool, tmp_path: Path
) -> None:
    words = flags(**{**QUICK, "save_interval": 1}, save=tmp_path, async_save=asynchronous)
    words += ["--save-retain-interval", "4", "--train-iters", "7"]
    assert train(words) == 0
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == ["iter_0000004", "iter_0000006", "iter_0000007"]
    assert documents(tmp_path, 7)["counters"]["last_good_iteration"] == 6


def test_every_field_of_the_schedule_is_compared_through_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_warmup_iters": 2}
    wsd |= {"lr_warmup_init": 1e-5, "decoupled_lr": 5e-3, "decoupled_min_lr": 1e-4}
    shared = {**QUICK, "train_iters": 8, "lr_wsd_decay_style": "linear", **wsd}
    assert train(flags(**shared, save=tmp_path, exit_interval=5)) == 0
    changes = {"lr_wsd_decay_iters": 6, "lr_wsd_decay_style": "cosine", "lr_warmup_init": 1e-4}
    changes |= {"decoupled_lr": 6e-3, "decoupled_min_lr": 1e-5}
    resume = {**shared, "save_interval": None, "load": tmp_path}
    capsys.readouterr()
    assert train(flags(**{**resume, **changes})) == 1
    error = capsys.readouterr().err
    for part in (
        "lr_wsd_decay_steps is 8 in the checkpoint and 12 in",
        "lr_wsd_decay_style is 'linear' in the checkpoint and 'cosine' in",
        "lr_warmup_init is 1e-05 in the checkpoint and 0.0001 in",
        "decoupled_lr is 0.005 in the checkpoint and 0.006 in",
        "decoupled_min_lr is 0.0001 in the checkpoint and 1e-05 in",
    ):
        assert part in error
    plain, taken = Recorded(), Recorded()
    assert train(flags(**resume), plain) == 0
    # A command line without a word of WSD takes all of it from the checkpoint.
    none = dict.fromkeys(wsd, None) | {"lr_wsd_decay_style": None, "lr_decay_style": "constant"}
    words = [*flags(**{**resume, **none}), "--use-checkpoint-opt_param-scheduler"]
    assert train(words, taken) == 0
    assert taken.losses == plain.losses
