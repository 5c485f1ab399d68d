"""Weights from a trainer's ranks to an inference engine's, without a file, planned ahead and proved after.

`layouts` says where both sides hold what, `engines` how vLLM and SGLang name and cut it, `planner` makes a
`plan` of it, `execute` moves the bytes (`moving`) and proves the result, `held` finds the
tensors in a model, and `quantized` and `packer` say and make what servers with packed weights get.
"""
