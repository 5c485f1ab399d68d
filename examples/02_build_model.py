"""Build a tiny Super on the CPU and take three training steps."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

import megatron_nemotron3 as n3

with n3.cpu_mode():  # leave out on a GPU
    model = n3.build_model("super", tiny=True, precision="fp32", backend="torch")
    print(type(model).__name__, f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 2048, (2, 128))  # [b, s]
    positions = torch.arange(128).expand(2, -1)
    for step in range(3):
        # With labels a Megatron model returns token losses [b, s]; backward adds the MTP gradients.
        loss = model(tokens, positions, None, labels=tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
