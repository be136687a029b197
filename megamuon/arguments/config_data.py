"""Flags of the datasets and of evaluation.

Owns ``DataFlags`` and ``ValidationFlags``. Invariant: as in ``config_model``. Tested by
``tests/arguments/test_table.py`` and ``test_validate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megamuon.flags import flag


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Where samples come from and in which order."""

    data_path: tuple[str, ...] | None = flag(
        None, "dataset prefixes: one, several, or weight and prefix in turns"
    )
    split: str | None = flag(
        None,
        "shares of training, validation and test, such as 969,30,1 (the value used when not given)",
    )
    train_data_path: tuple[str, ...] | None = flag(None, "prefixes of a training set of its own")
    valid_data_path: tuple[str, ...] | None = flag(None, "prefixes of a validation set of its own")
    test_data_path: tuple[str, ...] | None = flag(None, "prefixes of a test set of its own")
    data_cache_path: str | None = flag(
        None, "directory of the index caches; beside the dataset when not given"
    )
    mock_data: bool = flag(False, "synthetic tokens instead of files")
    dataloader_type: Literal["single", "cyclic"] | None = flag(
        None, "single (also when not given): one pass in order; cyclic: reshuffle every epoch"
    )
    reset_position_ids: bool = flag(False, "positions start again after an end of document")
    reset_attention_mask: bool = flag(False, "no attention across an end of document")
    eod_mask_loss: bool = flag(False, "no loss where the input is the end-of-document token")
    mmap_bin_files: bool = flag(
        True,
        "read token files piece by piece instead of mapping them",
        off_names=("--no-mmap-bin-files",),
    )
    num_dataset_builder_threads: int = flag(1, "threads that build dataset indices", low=1)
    mid_level_dataset_surplus: float = flag(
        0.005, "share of extra samples built per dataset of a blend", low=0.0
    )
    dataloader_fast_cache_load: bool = flag(False, "load index caches without checking their hash")
    shuffle: Literal["global", "epoch"] = flag(
        "global",
        "global: documents of all epochs are shuffled together (Megatron's order); epoch: every "
        "document "
        "is seen once before any is repeated",
    )


@dataclass(frozen=True, kw_only=True)
class ValidationFlags:
    """When and how much to evaluate."""

    eval_iters: int = flag(100, "batches per evaluation, validation and test alike", low=0)
    eval_interval: int | None = flag(
        None, "steps between evaluations; never during training when not given", low=1
    )
    start_eval_at_iter: int | None = flag(None, "no evaluation before this step", low=0)
    eval_global_batch_size: int | None = flag(
        None, "samples per evaluation batch; --global-batch-size when not given", low=1
    )
    eval_micro_batch_size: int | None = flag(
        None, "samples per rank and forward in evaluation; --micro-batch-size when not given", low=1
    )
