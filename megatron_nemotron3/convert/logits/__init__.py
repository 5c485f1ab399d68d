"""`--check-logits N`: a conversion computes the same on both sides, proven layer by layer from disk.

weights       tensors of a checkpoint as FP32, a band of rows at a time
reference     each layer kind on Megatron's tensors, in plain torch
hugging_face  the same layers by transformers' own modules, on Hugging Face's tensors
compare       both walked in step: `check_logits`
report        what was seen, and whether it is within the tolerances

No model is built: memory is one layer's weights without its routed experts, and of those one. Needs torch,
and transformers when called; no megatron, no GPU.
"""
