#!/usr/bin/env python3
"""Train in one process, serve in another, and move the weights between them without a file.

    torchrun --nproc-per-node 2 examples/refit.py

Rank 0 trains a tiny Super with Megatron's layers. After each step the weights go to rank 1 under Hugging
Face's names, as vLLM's `load_weights` takes them; here they go to the engine of `nemotron3 generate`. Both
compute the log-probability of every token of the same text, in FP32.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

import megatron_nemotron3 as n3
from megatron_nemotron3.inference.generate import Decode, Engine
from megatron_nemotron3.inference.refit import EngineLayout, Refit, Training, make_plan, training_tensors

TEXT = torch.arange(3, 67)[None]  # [b, s]
STEPS = 3


def train(refit: Refit, config: n3.Nemotron3Config) -> None:
    """Rank 0."""
    # The gradient is that of the loss below alone; MTP keeps its weights.
    model = n3.build_model(config, precision="fp32", backend="torch", auxiliary_losses=False)
    weights = [tensor for name, tensor in model.named_parameters() if not name.startswith("mtp.")]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    tokens, labels = TEXT[:, :-1], TEXT[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(tokens, positions, None, labels=labels).mean().backward()
        optimizer.step()
        for _ in refit.stream(training_tensors(refit.plan.training, 0, [model])):
            raise AssertionError("only rank 1 receives")
        # With labels a Megatron model returns losses [b, s], the negative log-probabilities.
        with torch.no_grad():
            dist.send(-model(tokens, positions, None, labels=labels), dst=1)


def serve(refit: Refit, config: n3.Nemotron3Config) -> None:
    """Rank 1."""
    for step in range(STEPS):
        weights = dict(refit.stream({}))
        engine = Engine(Decode(config, weights.__getitem__, torch.float32))
        logits = engine.forward(TEXT[:, :-1], engine.new_state()).logits
        served = logits.log_softmax(-1).gather(-1, TEXT[:, 1:, None]).squeeze(-1)
        trained = torch.empty_like(served)
        dist.recv(trained, src=0)
        difference = (served - trained).abs().max().item()
        print(f"step {step}: {len(weights)} tensors, mean log-probability {served.mean():.4f}, ", end="")
        print(f"largest difference between trainer and server {difference:.1e}")


def main() -> None:
    """Both ranks make the same plan."""
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start it with: torchrun --nproc-per-node 2 examples/refit.py")
    config = n3.get("super-tiny")
    with n3.cpu_mode():  # leave out on GPUs
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1234)
        server = EngineLayout.of(config, "replicas=1", engine="hf", dtype="float32")  # default: bfloat16
        plan = make_plan(Training.of(config, "tp=1"), server)
        refit = Refit(plan, senders=[0], receivers=[1])
        (train, serve)[dist.get_rank()](refit, config)
        refit.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
