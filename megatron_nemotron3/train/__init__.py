"""`nemotron3 train`: prepare text, start Megatron's training loop, follow it, report what came out."""
