"""Read, verify, write and resume Megatron checkpoint folders without Megatron, and convert them."""
