"""Is this environment fit to train: versions, kernels, GPU, one step. `nemotron3 doctor`."""
