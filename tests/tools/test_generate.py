"""A sample from a checkpoint, in one process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.training import ROOT, flags, train


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert train(flags(train_iters=2, save=folder, save_interval=1, eval_iters=0)) == 0
    return folder


def test_the_same_seed_gives_the_same_text(
    script: ModuleType, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", str(saved), "--prompt", "def ", "--tokens", "4"]
    texts = []
    for name in ("a", "b"):
        assert script.main([*words, "--json", str(tmp_path / name)]) == 0
        texts.append(json.loads((tmp_path / name).read_text())["continuation"])
    assert texts[0] == texts[1]
    assert capsys.readouterr().out.startswith("def ")


def test_an_older_iteration_has_its_own_weights(script: ModuleType, saved: Path) -> None:
    models = [script.read_model(saved, iteration, torch.device("cpu"))[0] for iteration in (1, 2)]
    first, second = (model.model.norm.weight for model in models)
    assert not torch.equal(first, second)
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight  # tied


def test_what_is_missing_is_one_line(
    script: ModuleType, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--load", str(tmp_path)]) == 1
    assert "no checkpoint there" in capsys.readouterr().err
    assert script.main(["--load", str(saved), "--iteration", "9"]) == 1
    error = capsys.readouterr().err
    assert "9" in error
    assert len(error.splitlines()) == 1
