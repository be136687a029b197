"""The data room: tokenizers, indexed datasets, GPT samples, blends, splits, samplers and loaders.

Byte- and index-compatible with Megatron-LM.  It knows nothing of process groups: ranks come in as
numbers, barriers and comparisons as callables.  Import from its modules (``build`` for datasets and
loaders, ``tokenizer``, ``indexed``): nothing is imported here, so that preprocessing starts without
torch.  Tested by ``tests/data_room``.
"""
