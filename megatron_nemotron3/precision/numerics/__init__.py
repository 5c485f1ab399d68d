"""Number formats below 16 bits, on torch tensors. This package itself imports nothing; its modules, torch.

e2m1    4-bit elements: round, pack two in a byte, decode
e4m3    8-bit elements and scales: round, decode
grid    rounding FP32 tensors to the values of a format, to nearest or stochastically, fast
nvfp4   weights as E2M1 with an E4M3 scale for 16 elements and an FP32 scale for the tensor
fp8     weights as E4M3 with an FP32 scale for the tensor
"""

#: Consecutive elements that share a scale.
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32
