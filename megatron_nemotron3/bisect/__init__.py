"""Which of two systems deviates from a checkpoint: from which token, at which layer, by what (docs/bisect.md).

recording   the file: token ids and their log-probabilities, router choices and hidden states of one system
record      writes it, from a Megatron model or from what an engine reports
recompute   the same sequences from the checkpoint, a layer at a time
command     `nemotron3 bisect`
"""
