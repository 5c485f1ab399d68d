"""Number formats below 16 bits, on torch tensors. The package itself imports nothing; its modules, torch."""

#: Consecutive elements that share a scale.
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32
#: Searches for NVFP4 block scales of least error (`nvfp4`): 6 or 4 as the largest element, all of E4M3.
FOUR_OVER_SIX, ALL_SCALES = "4over6", "mse"
