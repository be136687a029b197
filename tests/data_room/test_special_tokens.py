"""End, begin and padding as the files of a model directory name them; names that are not found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megamuon.data.tokenizer import build_tokenizer
from tests.data_room.test_tokenizer import train_bpe


def directory(tmp_path: Path, **files: Any) -> str:
    """A tokenizer whose vocabulary has only ``<|endoftext|>``, and the files beside it."""
    made = train_bpe(tmp_path, {})
    (made / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (made / f"{name}.json").write_text(json.dumps(content))
    return str(made)


def build(path: str, eod_token: str | None = None) -> Any:
    return build_tokenizer("HuggingFaceTokenizer", path, eod_token=eod_token)


def size_of(tmp_path: Path) -> int:
    return build(directory(tmp_path / "plain")).vocab_size


END = "<|im_end|>"


@pytest.mark.parametrize("form", ["text", "object"])
@pytest.mark.parametrize("place", ["decoder", "added", "map"])
def test_an_end_that_only_other_files_know(tmp_path: Path, form: str, place: str) -> None:
    size = size_of(tmp_path)
    name = END if form == "text" else {"content": END, "special": True, "lstrip": False}
    entry = {str(size): {"content": END, "special": True}}
    files: dict[str, Any] = {
        "decoder": {"tokenizer_config": {"eos_token": name, "added_tokens_decoder": entry}},
        "added": {"tokenizer_config": {"eos_token": name}, "added_tokens": {END: size}},
        "map": {"special_tokens_map": {"eos_token": name}, "added_tokens": {END: size}},
    }
    made = build(directory(tmp_path / "made", **files[place]))
    assert (made.eos, made.eod, made.vocab_size) == (size, size, size + 1)
    assert made.encode(f"the dog{END}")[-1] == size  # and not its letters
    assert made.encode(END) == [size]
    assert made.decode([size]) == END


def test_a_name_of_the_vocabulary_is_one_id_in_texts(tmp_path: Path) -> None:
    made = build(directory(tmp_path, tokenizer_config={"eos_token": "the"}))
    assert made.encode("the") == [made.eod]


@pytest.mark.parametrize("role", ["eos_token", "bos_token", "pad_token"])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_a_name_that_is_nowhere_is_an_error(tmp_path: Path, role: str, file: str) -> None:
    made = directory(tmp_path, **{file: {role: END}})
    with pytest.raises(ValueError, match=rf"{file}\.json: {role} .*im_end.*neither"):
        build(made)


def test_what_is_named_on_the_command_line_decides(tmp_path: Path) -> None:
    made = directory(tmp_path, tokenizer_config={"eos_token": END})
    assert build(made, "<|endoftext|>").eod == 0
    with pytest.raises(ValueError, match="--eod-token '<none>'"):
        build(made, "<none>")


def test_ids_of_the_model_configuration(tmp_path: Path) -> None:
    made = build(directory(tmp_path / "one", generation_config={"eos_token_id": [7, 7]}))
    assert made.eod == 7
    assert (
        build(directory(tmp_path / "two", config={"pad_token_id": 5, "eos_token_id": 6})).pad == 5
    )
    both = {"tokenizer_config": {"eos_token": "<|endoftext|>"}}
    both["generation_config"] = {"eos_token_id": [8, 9]}
    assert build(directory(tmp_path / "three", **both)).eod == 0
    with pytest.raises(ValueError, match=r"eos_token_id lists \[8, 9\].*--eod-token"):
        build(directory(tmp_path / "four", generation_config=both["generation_config"]))
    with pytest.raises(ValueError, match="eos_token_id 99999 is not in the vocabulary"):
        build(directory(tmp_path / "five", generation_config={"eos_token_id": 99999}))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config": [1]}, "holds a list"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5"),
        ({"tokenizer_config": {"eos_token": {"special": True}}}, "eos_token has no text"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "'x'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"3": {"content": END}}}}, "has the id 3"),
        ({"added_tokens": {END: "7"}}, "which is no number"),
        ({"added_tokens": {END: 9000}}, "has the id 9000"),
        ({"generation_config": {"eos_token_id": "7"}}, "which is no id"),
    ],
)
def test_files_that_contradict_are_named(tmp_path: Path, files: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(files))}\.json.*{words}"):
        build(directory(tmp_path, **files))


def test_several_known_names_are_not_a_choice(tmp_path: Path) -> None:
    made = train_bpe(tmp_path, {"unk_token": "</s>", "cls_token": "<|endoftext|>"})
    with pytest.raises(ValueError, match=r"several tokens may be it \(<\|endoftext\|>, </s>\)"):
        build(str(made))
