"""Tokenizers: round trips, special ids, identities, and errors that name the flag."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megamuon.data.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
    pad_id,
    padded_vocab_size,
)

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "the dog and the fox"] * 20


def train_bpe(directory: Path, specials: dict[str, str]) -> Path:
    """A small byte-level BPE tokenizer with the files that a model directory has."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(dict.fromkeys(specials.values())) or ["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    if "bos_token" in specials:
        bos = specials["bos_token"]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(specials))
    return directory


def test_bytes() -> None:
    made = build_tokenizer("byte")
    assert isinstance(made, Tokenizer)
    assert (made.vocab_size, made.eod, made.pad) == (257, 256, None)
    text = "naïve 東京 \x00"
    assert made.decode(made.encode(text)) == text
    assert made.decode([104, 256, 300, 105, 0xFF]) == "hi\ufffd"
    assert made.encode("a\ud800") == [97, 63]


def test_null() -> None:
    made = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (made.vocab_size, made.eod) == (101, 100)
    assert made.encode("3 1 100") == [3, 1, 100]
    assert made.decode([3, 1]) == "3 1"
    with pytest.raises(ValueError, match=r"id 101 .*--vocab-size"):
        made.encode("101")


def test_hugging_face_directory(tmp_path: Path) -> None:
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    made = build_tokenizer("HuggingFaceTokenizer", str(train_bpe(tmp_path / "one", specials)))
    assert (made.bos, made.eos, made.pad, made.eod) == (0, 1, 2, 1)
    ids = made.encode("the quick fox")
    assert 0 not in ids  # no special tokens are added, whatever the post-processor says
    assert max(ids) < made.vocab_size
    assert made.decode(ids) == "the quick fox"
    assert made.decode([*ids, made.vocab_size + 5]) == "the quick fox"
    train_bpe(tmp_path / "two", specials)
    again = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "two" / "tokenizer.json"))
    assert again.identity() == made.identity()  # contents, not places
    other = specials | {"eos_token": "<pad>"}
    changed = build_tokenizer("HuggingFaceTokenizer", str(train_bpe(tmp_path / "three", other)))
    assert changed.identity() != made.identity()


def test_end_of_document_is_found_or_asked_for(tmp_path: Path) -> None:
    plain = build_tokenizer("HuggingFaceTokenizer", str(train_bpe(tmp_path / "plain", {})))
    assert plain.decode([plain.eod]) == "<|endoftext|>"
    odd = str(train_bpe(tmp_path / "odd", {"unk_token": "<stop>"}))
    with pytest.raises(ValueError, match="--eod-token"):
        build_tokenizer("HuggingFaceTokenizer", odd)
    assert build_tokenizer("HuggingFaceTokenizer", odd, eod_token="<stop>").eod == 0
    with pytest.raises(ValueError, match=r"--eod-token '<none>'"):
        build_tokenizer("HuggingFaceTokenizer", odd, eod_token="<none>")


def test_a_directory_that_only_transformers_reads(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "[PAD]": 2, "a": 3, "b": 4, "ab": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    configuration = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "bos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    made = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert made.encode("aba") == [5, 3]
    assert (made.eod, made.decode([5, 3])) == (1, "aba")
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    assert build_tokenizer("GPT2BPETokenizer", **files, eod_token="</s>").encode("aba") == [5, 3]


def test_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "small"),
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
    )
    for kind in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        made = build_tokenizer(kind, str(tmp_path / "small.model"))
        assert (made.bos, made.eos, made.pad, made.eod) == (1, 2, 3, 2)
        assert made.decode(made.encode("the lazy dog")) == "the lazy dog"
    (tmp_path / "bad.model").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"bad\.model"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "bad.model"))


def test_errors_name_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--tokenizer-type is required"):
        build_tokenizer(None)
    with pytest.raises(ValueError, match=r"--tokenizer-type BertWord: not one of"):
        build_tokenizer("BertWord", "x")
    with pytest.raises(ValueError, match="--vocab-size"):
        build_tokenizer("NullTokenizer")
    with pytest.raises(ValueError, match="--tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer")
    with pytest.raises(ValueError, match="--merge-file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file="v")
    with pytest.raises(FileNotFoundError, match=r"--tokenizer-model .*absent"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "absent"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    files = {"vocab_file": str(tmp_path / "v"), "merge_file": str(tmp_path / "m")}
    for path in files.values():
        Path(path).write_text("{")
    with pytest.raises(ValueError, match=r"--vocab-file .*v and --merge-file .*m: not a vocab"):
        build_tokenizer("GPT2BPETokenizer", **files)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match="pip install sentencepiece"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tokenizer.json"))


def test_padding_is_not_ambiguous() -> None:
    made = ByteTokenizer()
    assert pad_id(made) == -1
    made.pad = made.eod
    assert pad_id(made) == -1
    assert pad_id(made, allow_ambiguous=True) == 256
    made.pad = 7
    assert pad_id(made) == 7


def test_padded_vocabulary() -> None:
    assert padded_vocab_size(257, 128) == 384
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(384, 128) == 384
    with pytest.raises(ValueError, match="--make-vocab-size-divisible-by 0"):
        padded_vocab_size(257, 0)


def test_null_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="--vocab-size 0"):
        NullTokenizer(0)
