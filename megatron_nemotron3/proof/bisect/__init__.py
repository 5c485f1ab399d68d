"""Two systems disagree on log-probabilities: which of them deviates from the checkpoint, where, and why?

recording   the file: token ids and their log-probabilities, router choices and hidden states of one system
record      writes it for a Megatron model in any layout
engine      makes it of what an inference engine returns
recompute   the same sequences from the checkpoint, a layer at a time
command     `nemotron3 bisect` (docs/bisect.md)
"""
