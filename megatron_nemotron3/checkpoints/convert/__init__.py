"""Convert checkpoints between Megatron and Hugging Face.

Only the standard library is imported; numpy is needed to convert, torch to cast or quantize.

Tables and plans, without files:
  inventory                    every tensor of a model, and the mappings between both sides
  keys                         what a checkpoint key means; keys of the optimizer's FP32 masters
  plan, transforms             copy plans as data; the conversion rules and the tensor-parallel split
  config_json, omni_config, megatron_args   config.json and stored arguments <-> models

Reading:
  sources                      lazy access to tensor slices in files
  hf_folder, torch_dist        the kinds of checkpoint folders
  checkpoints                  open any of them: weights, model, what is left out
  views                        lazy views: converted, cast or renamed tensors
  quantized_recipes, _config, _views    NVFP4 and FP8: plans, configuration files, packing and unpacking

Writing:
  from_hf, to_hf               plan the files of both directions
  streams, job, workers        write files as streams; a restartable job; several processes
  conversion, verify, compare  convert, compare two checkpoints
  checksums                    CRC32s of records that are read in pieces
  command, check               `nemotron3 convert`, `nemotron3 verify`, `nemotron3 check`
  logits                       `--check-logits`: compare what both sides compute
"""
