"""`--check-logits N`: show that both sides of a conversion compute the same, layer by layer from disk.

reader        checkpoint tensors as FP32, a band of rows at a time
reference     each layer kind on Megatron's tensors, in plain torch
hugging_face  the same layers by transformers' own modules, on Hugging Face's tensors
routing       expert selections of both sides, and near ties between them
compare       `check_logits`: runs both sides in lockstep
report        the differences, and whether they are within the tolerances

No model is built: memory holds the weights of one layer, with one routed expert at a time. Needs torch, and
transformers when called, but neither megatron-core nor a GPU.
"""
