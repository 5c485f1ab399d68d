"""Checkpoints between Megatron and Hugging Face. Standard library only at import, numpy to convert.

What is what, no files involved:
  names, places, inventory   the table: Megatron key <-> Hugging Face name, and every tensor of a model
  plan, transforms, sharding which slices of which tensors make up which others, as data
  config_json, megatron_args config.json and Megatron's stored arguments <-> Nemotron3Config
  extra_state, masters       keys of TransformerEngine's empty state, and of the optimizer's FP32 weights
  table                      docs/reference/checkpoint_names.md

Reading:
  stored                     tensors as blocks of files; any slice as raw bits
  hf_folder, safetensors_header; dist_folder, dcp_folder; mp_rank, rank_file      the kinds of folders
  checkpoints                any of them opened: weights, model, what is left out
  views                      one side's tensors made of the other's; casts
  quantized_*                packed NVFP4 and FP8 as views, recipes and configuration files

Writing:
  streams, job, workers      files as streams; a folder of them, restartable, in several processes
  to_hf, from_hf             the plans of both directions
  compare                    two checkpoints, tensor by tensor
  options, command           the command line
"""
