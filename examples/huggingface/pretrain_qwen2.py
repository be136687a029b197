"""Pretrain a Hugging Face Qwen2 with Muon on matrix owners, and save it as a Hugging Face model.

Shows the runtime on a model that is not ours: ``megamuon.shard`` takes the class of the layers and
a route function, and the loop stays the user's own.  Weights are random and nothing is downloaded.
The folder that it writes loads with ``from_pretrained`` anywhere, which is checked at the end.
Tested by ``tests/test_examples.py``.

    python examples/huggingface/pretrain_qwen2.py
    torchrun --nproc-per-node 2 examples/huggingface/pretrain_qwen2.py --output my-model
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

try:
    import megamuon
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import megamuon
from megamuon.mesh import Mesh, MeshError, destroy, initialise, mesh_from_environment

BYTES = 256  # the vocabulary: tokens are bytes

Say = Callable[[str], object]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a Hugging Face Qwen2 on matrix owners.")
    parser.add_argument("--model-config", type=Path, help="config.json of a Qwen2; tiny without it")
    parser.add_argument("--untied", action="store_true", help="output head with its own weight")
    parser.add_argument("--text", type=Path, help="file to train on; a module's source without it")
    parser.add_argument("--output", type=Path, help="folder for the trained model; else temporary")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step, all ranks")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-2, help="peak, for Muon and AdamW alike")
    parser.add_argument("--wd", type=float, default=0.1)
    parser.add_argument("--zero-stage", type=int, choices=(2, 3), default=3)
    parser.add_argument("--rows", type=int, default=1, help="replicas of HSDP, e.g. the nodes")
    parser.add_argument("--bf16", action="store_true", help="compute in BF16; masters stay FP32")
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def model_config(arguments: argparse.Namespace) -> Qwen2Config:
    """The file's configuration, or about 0.1M parameters with tied embeddings."""
    if arguments.model_config is not None:
        return Qwen2Config.from_json_file(arguments.model_config)
    return Qwen2Config(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=not arguments.untied,
    )


def read_tokens(path: Path | None) -> Tensor:
    """The bytes of a text file, or of a module of the standard library, as ``(length,)`` tokens."""
    data = Path(path or argparse.__file__).read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def local_batch(tokens: Tensor, step: int, arguments: argparse.Namespace, mesh: Mesh) -> Tensor:
    """This rank's rows of the step's batch.

    All ranks draw the same batch and take turns in it, so a run does not depend on their number.
    """
    generator = torch.Generator().manual_seed(arguments.seed + step)
    last = len(tokens) - arguments.seq_length
    starts = torch.randint(0, last + 1, (arguments.batch_size, 1), generator=generator)
    rows = tokens[starts + torch.arange(arguments.seq_length)]
    return rows[mesh.rank :: mesh.world_size].to(mesh.device)


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """Warm-up over a tenth of the steps, then linearly to zero."""
    warmup = max(1, arguments.steps // 10)
    left = (arguments.steps - step) / max(1, arguments.steps - warmup)
    return arguments.lr * min((step + 1) / warmup, left)


def route(name: str, parameter: nn.Parameter, module: nn.Module) -> megamuon.Route | None:
    """An output head is an ``nn.Linear`` like any other here, but no matrix for Muon.

    Tied heads need no word: the token table comes first, and an embedding goes to AdamW anyway.
    """
    return megamuon.Route.ADAMW_SHARDED if name == "lm_head.weight" else None


def train(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Shard, train, save, check."""
    torch.manual_seed(arguments.seed)  # the same random weights on every rank
    config = model_config(arguments)
    tokens = read_tokens(arguments.text)
    say: Say = print if mesh.rank == 0 else (lambda _: None)

    model = Qwen2ForCausalLM(config).to(mesh.device)
    if arguments.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    runtime = megamuon.shard(
        model,
        layers=(Qwen2DecoderLayer,),
        mesh=mesh,
        route=route,
        config=megamuon.RuntimeConfig(
            zero_stage=arguments.zero_stage,
            compute_dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
        ),
    )
    say(runtime.report())

    for step in range(arguments.steps):
        batch = local_batch(tokens, step, arguments, mesh)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        result = runtime.step(learning_rate(step, arguments), arguments.wd)
        if step % 10 == 0 or step == arguments.steps - 1:
            mean = loss.detach().float() / mesh.world_size
            dist.all_reduce(mean)
            say(f"step {step:4d}  loss {mean.item():.6f}  norm {result.gradient_norm:.4f}")

    with tempfile.TemporaryDirectory() as scratch:  # gone at the end; --output stays
        folder = arguments.output or Path(scratch)
        save(runtime, config, folder)
        check(model, folder, local_batch(tokens, 0, arguments, mesh), say)


def save(runtime: megamuon.Runtime, config: Qwen2Config, folder: Path) -> None:
    """Rank 0 writes ``config.json`` and ``model.safetensors``; all ranks help to gather."""
    weights: dict[str, Tensor] = {}
    for name, whole in runtime.full_parameters():  # one layer at a time
        if runtime.rank == 0:
            weights[name] = whole.cpu()
    if runtime.rank != 0:
        return
    for parameter in runtime.plan.parameters:  # tied weights go by several names
        weights.update(dict.fromkeys(parameter.aliases, weights[parameter.name]))
    with torch.device("meta"):
        plain = Qwen2ForCausalLM(config)
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)


@torch.no_grad()
def check(model: nn.Module, folder: Path, batch: Tensor, say: Say) -> None:
    """The saved model gives the logits of the sharded one."""
    model.eval()
    ours = model(input_ids=batch, use_cache=False).logits  # on every rank: it gathers weights
    if dist.get_rank() != 0:
        return
    saved, unmatched = Qwen2ForCausalLM.from_pretrained(
        folder, dtype=ours.dtype, output_loading_info=True
    )
    if any(unmatched.values()):
        raise RuntimeError(f"{folder}: weights that do not match the model: {unmatched}")
    theirs = saved.to(batch.device).eval()(input_ids=batch, use_cache=False).logits
    torch.testing.assert_close(theirs, ours)
    say(f"saved to {folder}: reloading it gives the same logits")


def main() -> None:
    arguments = parse_arguments()
    try:
        mesh = mesh_from_environment(replicas=arguments.rows)
    except MeshError as error:
        sys.exit(f"--rows {arguments.rows}: {error}")
    if arguments.batch_size % mesh.world_size:
        sys.exit(f"--batch-size {arguments.batch_size} must divide by {mesh.world_size} ranks")
    initialise(mesh)
    train(arguments, mesh)
    destroy()


if __name__ == "__main__":
    main()
