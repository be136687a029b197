"""Baselines that the owner runtime is compared with, trained by the same loop: FSDP2.

Owns line A, torch's FSDP2 with AdamW. A room of its own above ``runtime``, which knows nothing of
it: what both implement is ``runtime.trainable.TrainableRuntime``. It exports no names, so that
torch's ``fully_shard``, which takes as long to import as torch, is imported for line A alone.
Tested by ``tests/distributed/test_fully_sharded*.py`` and ``test_line_a_accumulation.py``.
"""
