"""Names, layouts and configurations of Megatron and Hugging Face checkpoints. Standard library only.

names        the table: Megatron key <-> Hugging Face name, shapes, rule, TP split
plan         which slices of which tensors make up which others, as data
transforms   the rules as plans, and as functions on arrays
sharding     the tensor-parallel split of each parameter, as plans
inventory    every tensor of a model, on either side, with the plans that join them
config_json  config.json <-> Nemotron3Config
table        docs/checkpoint_names.md
"""
