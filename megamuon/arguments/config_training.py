"""Flags of the run's length, optimizer, schedules and number formats.

Owns ``TrainingFlags``, ``OptimizerFlags``, ``ScheduleFlags`` and ``PrecisionFlags``. Invariant: as
in ``config_model``; Muon's defaults follow the paper's recipe and the flag table says so. Tested by
``tests/arguments/test_table.py`` and ``test_validate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megamuon.arguments.schema import flag


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Batch, duration, exit, and what happens at the end."""

    micro_batch_size: int | None = flag(None, "samples per rank and forward", low=1)
    global_batch_size: int | None = flag(
        None, "samples per optimizer step; micro batch times ranks when not given", low=1
    )
    train_iters: int | None = flag(None, "optimizer steps over all runs", low=1)
    train_samples: int | None = flag(None, "samples over all runs, instead of --train-iters", low=1)
    exit_interval: int | None = flag(
        None, "save and exit when the iteration is a multiple of this", low=1
    )
    exit_duration_in_mins: int | None = flag(
        None, "save and exit after so many minutes on the slowest rank", low=0
    )
    skip_train: bool = flag(False, "evaluate only")
    seed: int = flag(1234, "seed of initialisation, data order and dropout", low=0)
    deterministic_mode: bool = flag(False, "only kernels that repeat bit for bit")
    manual_gc: bool = flag(False, "turn Python's garbage collector off and collect on schedule")
    manual_gc_interval: int = flag(
        0, "steps between collections with --manual-gc; 0 = none in training", low=0
    )
    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        0, "return cached device memory after a step (1), or also inside it (2)"
    )
    train_sync_interval: int | None = flag(None, "steps between device synchronisations", low=1)
    sample_prompt: str | None = flag(
        None, "print a continuation of this text at the end of the run"
    )
    sample_tokens: int = flag(64, "tokens of the continuation of --sample-prompt", low=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """A matrix optimizer with AdamW for the rest, or AdamW or SGD for everything."""

    optimizer: Literal["muon", "adam", "sgd", "normuon", "shampoo", "soap"] = flag(
        "muon",
        "optimizer of the matrices, with AdamW for the rest; adam (adamw is the same) and sgd are "
        "for everything",
    )
    weight_decay: float = flag(0.01, "decoupled decay; not on biases and 1-D parameters", low=0.0)
    start_weight_decay: float | None = flag(
        None, "decay at the first step, with --weight-decay-incr-style linear or cosine", low=0.0
    )
    end_weight_decay: float | None = flag(None, "decay at the last step, likewise", low=0.0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "how the decay goes from its start to its end"
    )
    apply_wd_to_qk_layernorm: bool = flag(False, "decay the gains of query and key norms too")
    clip_grad: float = flag(1.0, "limit of the global gradient norm; 0 = none", low=0.0)
    adam_beta1: float = flag(0.9, "decay of AdamW's first moment", low=0.0, below=1.0)
    adam_beta2: float = flag(0.999, "decay of AdamW's second moment", low=0.0, below=1.0)
    adam_eps: float = flag(1e-8, "added to AdamW's denominator", above=0.0)
    sgd_momentum: float = flag(0.9, "momentum of SGD", low=0.0, below=1.0)
    normuon_beta2: float = flag(
        0.95,
        "decay of NorMuon's second moment of each row; the muon flags hold too",
        low=0.0,
        below=1.0,
    )
    normuon_eps: float = flag(1e-10, "added to NorMuon's denominator", above=0.0, below=1.0)
    shampoo_beta1: float = flag(0.9, "decay of Shampoo's momentum", low=0.0, below=1.0)
    shampoo_beta2: float = flag(1.0, "decay of Shampoo's factors; 1 sums them", above=0.0, high=1.0)
    shampoo_eps: float = flag(1e-12, "added to the factors' eigenvalues", above=0.0)
    shampoo_precondition_frequency: int = flag(
        1, "steps from one inversion of the factors to the next", low=1
    )
    shampoo_max_preconditioner_dim: int = flag(
        1024, "dims above this are split into blocks with factors of their own", low=1
    )
    shampoo_grafting: Literal["none", "sgd", "adagrad", "rmsprop", "adam"] = flag(
        "none", "rule whose step sizes Shampoo takes; none = its own"
    )
    soap_variant: Literal["nikhilvyas", "fb"] = flag(
        "nikhilvyas", "SOAP as its authors wrote it, or as facebookresearch/optimizers does"
    )
    soap_beta1: float = flag(0.95, "decay of SOAP's first moment", low=0.0, below=1.0)
    soap_beta2: float = flag(0.95, "decay of SOAP's second moment", low=0.0, below=1.0)
    soap_shampoo_beta: float | None = flag(
        None, "decay of SOAP's factors; --soap-beta2 when not given", low=0.0, below=1.0
    )
    soap_eps: float = flag(1e-8, "added to SOAP's denominator", above=0.0)
    soap_precondition_frequency: int = flag(
        10, "steps from one refresh of SOAP's bases to the next", low=1
    )
    soap_max_precond_dim: int = flag(
        10000, "dims above this keep the identity as their basis", low=1
    )
    muon_preset: Literal["megamuon", "torch"] = flag(
        "megamuon", "megamuon: the flags below; torch: bit for bit what torch.optim.Muon does"
    )
    muon_momentum: float = flag(0.95, "Muon's momentum", low=0.0, below=1.0)
    muon_momentum_form: Literal["sgd", "ema"] = flag(
        "sgd", "sgd: buffer = momentum*buffer + gradient; ema: a weighted mean of the two"
    )
    muon_nesterov: bool = flag(
        True,
        "Nesterov momentum in Muon, on by default; --no-muon-nesterov turns it off",
        names=("--muon-nesterov",),
        off_names=("--no-muon-nesterov",),
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral",
        "scale of the orthogonal update: sqrt(max(rows, cols)), sqrt(rows/cols) or sqrt(max(1, "
        "rows/cols))",
    )
    muon_extra_scale_factor: float = flag(0.2, "further factor of the update", above=0.0)
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations", low=1)
    muon_coefficient_type: Literal[
        "polar_express",
        "quintic",
        "jordan",
        "polar_express_101",
        "polar_express_102",
        "megatron_polar_express",
        "cans",
        "deepseek_v4",
        "cubic5",
    ] = flag(
        "polar_express",
        "coefficients of the Newton-Schulz polynomials: polar_express, the paper's with safety "
        "1.05 (gram-newton-schulz, DMuon); polar_express_101, the paper's own choices; "
        "polar_express_102, dion's; megatron_polar_express, what Megatron calls polar_express; "
        "quintic, Megatron's default; jordan, torch.optim.Muon's; cans, deepseek_v4 and cubic5, as "
        "in Megatron",
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = flag(
        "highest", "given to torch.set_float32_matmul_precision"
    )
    ns_form: Literal["auto", "standard", "gram"] = flag(
        "auto",
        "iterate on the matrix, on its Gram matrix, or on whichever costs less for the shape",
    )
    ns_dtype: Literal["auto", "fp32", "fp16", "bf16"] = flag(
        "auto",
        "dtype of the iteration; auto = fp16 on GPUs; on CPUs bf16 where a measurement at the "
        "start finds it faster on all ranks, else fp32; a resumed run keeps what it had (fp64 "
        "with --fp64)",
    )
    ns_restarts: tuple[int, ...] | None = flag(
        None,
        "iterations before which the Gram form restarts; computed from the coefficients when not "
        "given",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Learning rate over the run; Megatron's formulas."""

    lr: float | None = flag(None, "peak learning rate", above=0.0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", low=0.0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay"
    )
    lr_decay_iters: int | None = flag(
        None, "steps of the decay; --train-iters when not given", low=1
    )
    lr_decay_samples: int | None = flag(
        None, "samples of the decay; --train-samples when not given", low=1
    )
    lr_warmup_iters: int = flag(0, "steps of linear warmup", low=0)
    lr_warmup_samples: int = flag(0, "samples of linear warmup", low=0)
    lr_warmup_fraction: float | None = flag(
        None, "warmup as a share of the decay", low=0.0, below=1.0
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warmup", low=0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of the final anneal of WSD"
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of the final anneal of WSD", low=1)
    decoupled_lr: float | None = flag(
        None, "peak learning rate of embedding and output head; --lr when not given", above=0.0
    )
    decoupled_min_lr: float | None = flag(None, "end of the decay of --decoupled-lr", low=0.0)
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume, the schedule of the command line instead of the checkpoint's",
        names=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, the schedule of the checkpoint whatever the command line says",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """Number formats; FP32 compute when neither bf16 nor fp64 is given.  Masters are FP32 (FP64
    with --fp64).
    """

    bf16: bool = flag(False, "compute and gather in BF16 with FP32 masters")
    fp64: bool = flag(False, "everything in FP64, masters included: for equivalence tests")
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in BF16 instead of FP32")
    gather_in_bf16: bool = flag(
        False, "gather and publish weights in BF16 where the arithmetic stays FP32"
    )
