"""NVFP4 training: the published recipe, and its numerics.

The recipe, standard library only (PyYAML when a file is read):

table      which linear has which format, how many layers stay BF16: everything below comes from it
modules    names of a model's linears in closed form
share      parameters and FLOPs by format
schema, fit, yaml_file   the file of `--te-precision-config-file`, written and strictly read
census     every linear of a built model with the format it gets
command    `nemotron3 precision`
"""
