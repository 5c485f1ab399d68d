"""Token-by-token generation from a Megatron or a Hugging Face checkpoint.

Runs without megatron-core and without a process group, on the CPU or one GPU.
"""
