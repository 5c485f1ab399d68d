"""The layers of the models on plain torch and Megatron-Core, with upstream's parameter names."""
