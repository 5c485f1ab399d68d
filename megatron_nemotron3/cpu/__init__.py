"""Run Megatron-Core and Megatron's training loop without CUDA, by patches that `cpu_mode` makes and removes.

    with cpu_mode():
        ...  # anything of megatron.core or megatron.training, on CPU tensors and gloo

Megatron names CUDA everywhere: `torch.cuda.current_device()` for allocations, streams and events,
`device="cuda"`, `backend="nccl"`, tensor type names. Inside `cpu_mode` those names mean the CPU: each
replaced attribute is listed in a table with its replacement, and is put back on exit. Importing this package
patches nothing, and nothing is patched on a GPU.

    mode         the context manager
    torch_names  the table for torch, and stand-ins for CUDA's streams, events and devices
    collectives  the table for torch.distributed, and collectives that gloo lacks
    products     dense FP32 products by oneDNN, where it is faster
    megatron     the table for Megatron, and the arguments that cannot hold on a CPU
    async_save   the process that writes checkpoints beside training

It does not emulate CUDA: Triton kernels, CUDA graphs and TransformerEngine stay unavailable.
"""

from megatron_nemotron3.cpu.mode import cpu_mode, is_active, quiet_on_cpu

__all__ = ["cpu_mode", "is_active", "quiet_on_cpu"]
