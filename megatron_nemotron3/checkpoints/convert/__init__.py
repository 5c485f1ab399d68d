"""Convert checkpoints between Megatron and Hugging Face.

A checkpoint of any kind is opened as a source of tensors (`checkpoints`, `sources`). Lazy views rename, cut,
cast or quantize its tensors (`views`, `quantized_views`). Both directions plan their files to the byte
(`from_hf`, `to_hf`), and a restartable job writes them from the views (`job`, `streams`).
"""
