"""One training step of a tiny model, which finds parameters whose gradient is missing or zero."""

from __future__ import annotations

import torch

from megatron_nemotron3.cli.doctor.finding import DoctorFinding
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.models import Nemotron3Config, tiny
from megatron_nemotron3.models.own import model as named_model
from megatron_nemotron3.train.build import build_model

#: Tokens per sequence.
LENGTH = 128


def without_gradient(model: torch.nn.Module) -> dict[str, str]:
    """Parameter name -> "none" or "zero", for each trainable parameter without a nonzero gradient."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
        if gradient is None:
            found[name] = "none"
        elif not gradient.any():
            found[name] = "zero"
    return found


def findings(name: str) -> list[DoctorFinding]:
    """Train the tiny form of a model for one step, on the GPU if there is one, else on the CPU."""
    config = tiny(named_model(name))
    if torch.cuda.is_available():
        return _train_one_step(config, "cuda", "bf16")
    with cpu_mode():
        return _train_one_step(config, "cpu", "fp32")


def _train_one_step(config: Nemotron3Config, device: str, precision: str) -> list[DoctorFinding]:
    model = build_model(config, precision=precision)
    model.to(device)
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), device=device)
    positions = torch.arange(LENGTH, device=device).expand_as(ids)
    loss = model(ids, positions, None, labels=ids).float().mean()
    loss.backward()
    parameters = sum(1 for p in model.parameters() if p.requires_grad)
    missing = without_gradient(model)
    # With few tokens some experts get none, which is not an error.
    unchosen = {n for n, what in missing.items() if ".experts.linear_fc" in n and what == "zero"}
    found = [
        DoctorFinding(
            "step",
            "ok" if torch.isfinite(loss) else "error",
            f"{config.name} on {device} in {precision}: loss {loss.item():.3f}, {parameters} parameters",
        )
    ]
    found += [
        DoctorFinding(
            n,
            "error",
            f"gradient is {what}",
            "look for a detach, or a recomputation under no_grad, in the layers after it",
        )
        for n, what in missing.items()
        if n not in unchosen
    ]
    if unchosen:
        found.append(
            DoctorFinding("experts", "ok", f"{len(unchosen)} weights of experts that no token chose")
        )
    return found
