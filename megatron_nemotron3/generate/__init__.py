"""Generation: a model run token by token, from a Megatron or a Hugging Face checkpoint.

    weights      a checkpoint's tensors, laid out for decoding
    span         which tokens one forward pass gets, row by row
    state        what is kept between passes: attention keys and values, Mamba-2 windows and states
    mamba, attention, mlp, moe    the layer kinds, each for one token and for many
    engine       `Engine`: prefill in chunks, forward passes, snapshots to go back to
    mtp          `MTPState`: the multi-token-prediction block, depth by depth
    sampling     logits -> probabilities -> token
    generate     `generate`: prompts -> continuations
    speculative  `speculate`: the same, with MTP as the drafter
    evaluate, evaluate_plot       held-out loss by MTP depth, acceptance by number of drafts
    folder, text, screen          checkpoint, tokenizer and data of a folder; text as it appears
    command, evaluate_command     `nemotron3 generate`, `nemotron3 evaluate`

Needs torch; no megatron, no process group, CPU or one GPU.
"""
