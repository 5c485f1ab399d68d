"""Train: build a model, prepare text, run Megatron's training loop, report the losses."""
