"""Run Megatron-Core and Megatron's training loop without CUDA, by patches that `cpu_mode` makes and removes.

    with cpu_mode():
        ...  # anything of megatron.core or megatron.training, on CPU tensors and gloo

Inside the block CUDA's names mean the CPU: each replaced attribute is listed in a table with its replacement,
and is put back on exit. Importing this package patches nothing. It does not emulate CUDA: Triton kernels,
CUDA graphs and TransformerEngine stay unavailable.
"""

from megatron_nemotron3.cpu.mode import cpu_mode, is_active, quiet_on_cpu

__all__ = ["cpu_mode", "is_active", "quiet_on_cpu"]
