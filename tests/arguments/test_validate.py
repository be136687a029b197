"""Every contradiction is one line that names its flags; good command lines have none."""

from __future__ import annotations

import pytest

from megamuon.arguments import Config
from megamuon.arguments.run_context import RunContext
from megamuon.arguments.validate import CHECKS
from tests.support.command_lines import BASE, problems

FILES = BASE.replace("--mock-data", "")
SAMPLES = BASE.replace("--train-iters 10", "--train-samples 100")
NO_TOKENIZER = BASE.replace("--tokenizer-type byte", "")

# command line beyond the base, base, flags that the one problem must name
CONTRADICTIONS = [
    ("--hidden-size 65", BASE, "--hidden-size 65", "--num-attention-heads 4"),
    ("--num-query-groups 2", BASE, "--num-query-groups 2", "--group-query-attention"),
    ("--group-query-attention --num-query-groups 3", BASE, "--num-query-groups 3", "heads 4"),
    ("--kv-channels 7", BASE, "--kv-channels 7", "even"),
    ("--seq-length 256", BASE, "--seq-length 256", "--max-position-embeddings 128"),
    ("--swiglu --squared-relu", BASE, "--swiglu", "--squared-relu"),
    ("--use-rope-scaling --position-embedding-type none", BASE, "--use-rope-scaling", "rope"),
    ("--rope-scaling-factor 4", BASE, "--rope-scaling-factor 4.0", "--use-rope-scaling"),
    ("--reset-attention-mask --attention-backend flash", BASE, "--reset-attention-mask", "auto"),
    ("--global-batch-size 6", BASE, "--global-batch-size 6", "multiple of 4"),
    ("--eval-micro-batch-size 3", BASE, "--eval-global-batch-size 4", "multiple of 6"),
    ("--manual-gc-interval 5", BASE, "--manual-gc-interval 5", "--manual-gc"),
    ("--sample-tokens 5", BASE, "--sample-tokens 5", "--sample-prompt"),
    ("--train-samples 100", BASE, "--train-iters 10", "--train-samples 100"),
    ("--lr-warmup-samples 5", BASE, "--lr-warmup-samples 5", "--lr-warmup-iters"),
    ("--lr-warmup-iters 5", SAMPLES, "--lr-warmup-iters 5", "--lr-warmup-samples"),
    ("--lr-decay-iters 5", SAMPLES, "--lr-decay-iters 5", "--lr-decay-samples"),
    ("--lr-warmup-iters 10", BASE, "--lr-warmup-iters 10", "below the decay"),
    (
        "--lr-warmup-iters 2 --lr-warmup-fraction 0.1",
        BASE,
        "--lr-warmup-fraction 0.1",
        "--lr-warmup-iters 2",
    ),
    ("--min-lr 1", BASE, "--min-lr 1.0", "--lr 0.001"),
    ("--lr-warmup-init 1", BASE, "--lr-warmup-init 1.0", "--lr 0.001"),
    ("--lr-decay-style WSD", BASE, "--lr-decay-style WSD", "--lr-wsd-decay-iters"),
    ("--lr-wsd-decay-iters 3", BASE, "--lr-wsd-decay-iters 3", "WSD"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 3", SAMPLES, "WSD", "--train-iters"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
        BASE,
        "--lr-wsd-decay-iters 9",
        "8 steps",
    ),
    ("--decoupled-min-lr 1e-5", BASE, "--decoupled-min-lr", "--decoupled-lr"),
    (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        BASE,
        "--override-opt_param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
    ),
    ("--start-weight-decay 0.5", BASE, "--start-weight-decay 0.5", "linear"),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.5 --end-weight-decay 0.1",
        BASE,
        "--end-weight-decay 0.1",
        "--start-weight-decay 0.5",
    ),
    ("--ns-restarts 2 --ns-form standard", BASE, "--ns-restarts [2]", "gram"),
    ("--ns-restarts 3 2", BASE, "--ns-restarts [3, 2]", "ascend"),
    ("--ns-restarts 5", BASE, "--ns-restarts [5]", "--muon-num-ns-steps 5"),
    (
        "--muon-coefficient-type cubic5 --muon-num-ns-steps 4",
        BASE,
        "--muon-num-ns-steps 4",
        "cubic5",
    ),
    ("--muon-preset torch --ns-dtype fp32", BASE, "--ns-dtype fp32", "--muon-preset torch"),
    ("--bf16 --fp64", BASE, "--bf16", "--fp64"),
    ("--fp64 --grad-reduce-in-bf16", BASE, "--fp64", "--grad-reduce-in-bf16"),
    ("--fp64 --gather-in-bf16", BASE, "--fp64", "--gather-in-bf16"),
    ("--line A --gather-in-bf16", BASE, "--gather-in-bf16", "fsdp2"),
    ("--fp64 --ns-dtype bf16", BASE, "--ns-dtype bf16", "--fp64"),
    ("--ns-cost file", BASE, "--ns-cost file", "--ns-cost-file"),
    ("--ns-cost-file x", BASE, "--ns-cost-file x", "--ns-cost file"),
    ("--ns-cost closed-form --ns-cost-cache x", BASE, "--ns-cost-cache x", "measured"),
    ("--recompute-method block", BASE, "--recompute-method block", "full"),
    (
        "--recompute-granularity selective --recompute-method uniform",
        BASE,
        "--recompute-method uniform",
        "selective",
    ),
    ("--recompute-granularity full --recompute-method block", BASE, "full", "num-layers"),
    ("--recompute-granularity full --recompute-num-layers 1", BASE, "full", "--recompute-method"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        BASE,
        "--recompute-num-layers 3",
        "--num-layers 2",
    ),
    ("--recompute-modules mlp", BASE, "--recompute-modules mlp", "selective"),
    ("--save x", BASE, "--save x", "--save-interval"),
    ("--save-interval 5", BASE, "--save-interval", "--save"),
    ("--save x --save-interval 4 --save-retain-interval 6", BASE, "interval 6", "interval 4"),
    ("--async-save", BASE, "--async-save", "--save"),
    ("--ckpt-step 3", BASE, "--ckpt-step", "--load"),
    ("--no-load-optim", BASE, "--no-load-optim", "--load"),
    ("--finetune", BASE, "--finetune", "--pretrained-checkpoint"),
    (
        "--load x --finetune --use-checkpoint-opt_param-scheduler",
        BASE,
        "--finetune",
        "--use-checkpoint-opt_param-scheduler",
    ),
    ("--use-checkpoint-args", BASE, "--use-checkpoint-args", "--load"),
    ("", FILES, "--data-path", "--mock-data"),
    ("--data-path a", BASE, "--data-path", "--mock-data"),
    ("--data-path a --train-data-path b", FILES, "--data-path", "--train-data-path"),
    ("--train-data-path b --split 1,1,1", FILES, "--split 1,1,1", "--train-data-path"),
    ("--valid-data-path b", FILES, "--valid-data-path", "--train-data-path"),
    ("--data-path a --split 1,x", FILES, "--split 1,x", "969,30,1"),
    ("--data-path a --split 1e2,1", FILES, "--split 1e2,1", "969,30,1"),
    ("--data-path a --split 0,0,0", FILES, "--split 0,0,0", "969,30,1"),
    ("", NO_TOKENIZER, "--tokenizer-type", "required"),
    ("--tokenizer-type NullTokenizer", NO_TOKENIZER, "NullTokenizer", "--vocab-size"),
    ("--tokenizer-type HuggingFaceTokenizer", NO_TOKENIZER, "HuggingFace", "--tokenizer-model"),
    ("--tokenizer-model x", BASE, "--tokenizer-model x", "byte"),
    ("--vocab-file x", BASE, "--vocab-file x", "byte"),
    ("--vocab-size 300 --padded-vocab-size 256", BASE, "size 256", "--vocab-size 300"),
    ("--eod-token x", BASE, "--eod-token x", "byte"),
    ("--log-memory-interval 150", BASE, "--log-memory-interval 150", "--log-interval 100"),
    ("--wandb-entity x", BASE, "--wandb-entity x", "--wandb-project"),
    ("--log-timers-to-tensorboard", BASE, "--log-timers-to-tensorboard", "--tensorboard-dir"),
    ("--profile-step-start 12", BASE, "--profile-step-start 12", "--profile-step-end 12"),
    ("--use-pytorch-profiler", BASE, "--use-pytorch-profiler", "--profile"),
    ("--profile --use-pytorch-profiler", BASE, "--use-pytorch-profiler", "--tensorboard-dir"),
    ("--profile --profile-ranks 0 2", BASE, "--profile-ranks 2", "2 ranks"),
    ("--memory-snapshot-path x", BASE, "--memory-snapshot-path x", "--record-memory-history"),
    ("--exit-signal SIGINT", BASE, "--exit-signal SIGINT", "--exit-signal-handler"),
    ("--lr nan", BASE, "--lr nan", "finite"),
    ("--iterations-to-skip 3 0", BASE, "--iterations-to-skip 0", "at least 1"),
    ("--clip-grad -1", BASE, "--clip-grad -1.0", "at least 0"),
]


@pytest.mark.parametrize(("words", "base", "first", "second"), CONTRADICTIONS)
def test_a_contradiction_is_a_problem_that_names_its_flags(words, base, first, second):
    found = [p for p in problems(words, base=base) if first in p and second in p]
    assert len(found) == 1, problems(words, base=base)


GOOD = [
    ("", BASE),
    ("--num-attention-heads 3 --kv-channels 10", BASE),
    ("--optimizer adam --param-layout even", BASE),
    ("--optimizer sgd --param-layout even --bf16 --grad-reduce-in-bf16", BASE),
    ("--lr-warmup-samples 5 --lr-decay-samples 90", SAMPLES),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 2", BASE),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", BASE),
    ("--recompute-granularity selective --recompute-modules core_attn mlp", BASE),
    ("--save x --save-interval 4 --save-retain-interval 8 --async-save --load x", BASE),
    ("--load x --finetune --no-load-rng", BASE),
    ("--data-path 0.3 a 0.7 b --split 99,1,0", FILES),
    ("--train-data-path a --valid-data-path b", FILES),
    ("--tokenizer-type NullTokenizer --vocab-size 100 --padded-vocab-size 128", NO_TOKENIZER),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file a --merge-file b", NO_TOKENIZER),
    ("--tensorboard-dir x --log-timers-to-tensorboard", BASE),
    ("--profile --use-pytorch-profiler --tensorboard-dir x --profile-ranks 0 1", BASE),
    ("--muon-preset torch --no-muon-nesterov", BASE),
    ("--ns-form gram --ns-restarts 2 3", BASE),
    ("--exit-signal-handler --exit-signal SIGUSR1", BASE),
    ("--skip-train", BASE.replace("--train-iters 10 --lr 1e-3", "")),
]


@pytest.mark.parametrize(("words", "base"), GOOD)
def test_good_command_lines_have_no_problem(words, base):
    assert not problems(words, base=base)


def test_everything_required_is_asked_for_at_once():
    asked = {problem.split(":")[0] for problem in problems(base="")}
    assert asked == {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--max-position-embeddings",
        "--micro-batch-size",
        "--tokenizer-type",
        "--train-iters",
        "--lr",
        "--data-path",
    }


def test_checks_are_pure_and_take_an_empty_configuration():
    for check in CHECKS:
        config = Config()
        assert isinstance(check(config, RunContext(world_size=1)), list)
        assert config == Config()
