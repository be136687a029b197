"""MegaMuon: pretraining with matrix optimizers under FSDP, one owner per matrix."""

__version__ = "0.1.0"
