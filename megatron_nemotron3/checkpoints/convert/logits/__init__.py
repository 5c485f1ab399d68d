"""`--check-logits N`: show that both sides of a conversion compute the same, layer by layer from disk.

No model is built: memory holds the weights of one layer, with one routed expert at a time. Needs torch, and
transformers when called, but neither megatron-core nor a GPU.
"""
