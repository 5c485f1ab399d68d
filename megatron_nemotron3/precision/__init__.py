"""NVFP4 training: the published recipe, and its numerics.

The recipe, standard library only (PyYAML when a file is read):

table      which linear has which format, how many layers stay BF16: everything below comes from it
modules    names of a model's linears in closed form
share      parameters and FLOPs by format
schema, fit, yaml_file   the file of `--te-precision-config-file`, written and strictly read
census     every linear of a built model with the format it gets
command    `nemotron3 precision`

The numerics, torch alone:

spec, quantizer, packed                  operands; fake quantization; codes and scales in TE's layout
nvfp4, mxfp8, hadamard, blocks           scales, the rotation, the block grid

Emulated training:

settings, products, linear, experts      what is on; the three products of a linear, and of experts
install                                  into a built stack, by the precision file

What quantization did to operands (docs/nvfp4.md):

statistics, record, observe, shadow      definitions; collected in a step, of emulated and of plain runs
report, heatmap                          file and table; picture
"""
