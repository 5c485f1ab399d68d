"""Number formats below 16 bits, on torch tensors. The package itself imports nothing; its modules, torch."""

#: Consecutive elements that share a scale.
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32
