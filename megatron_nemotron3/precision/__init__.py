"""NVFP4 training: the published recipe, number formats, emulation on any device, and measured errors.

The recipe, standard library only (PyYAML when a file is read):

table                    which linear has which format, how many layers stay BF16; names of a model's linears
share                    parameters and FLOPs by format
yaml_file                the file of `--te-precision-config-file`, written and strictly read
census                   every linear of a built model with the format it gets
recipe                   how the operands of a linear's three matmuls are quantized
settings                 what is emulated and logged: environment variables and context managers
serving                  recipes of inference checkpoints: which weights are packed
command                  `nemotron3 precision`

Quantization, torch alone:

numerics/                number formats below 16 bits
scales, blocks           scales of blocks, the Hadamard transform; views of blocks
quantizer                operands as values and as bytes; in Triton: triton_quantize, triton_quantize_kernels

Emulated training:

products, linear, experts    matmuls of quantized operands; autograd functions of linears and of experts
packed                       matmuls with the packed weights of an inference checkpoint
install                      sets up the linears of a stack while it is built

Precision logging (docs/nvfp4.md):

statistics, observe      what is measured; in which steps, and reduced over ranks
report                   file, summary and plot
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.precision.settings import emulating as emulating
    from megatron_nemotron3.precision.settings import parse as parse
    from megatron_nemotron3.precision.table import bf16_tail as bf16_tail
    from megatron_nemotron3.precision.yaml_file import write_precision_file as write_precision_file
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {"settings": ["emulating", "parse"], "table": ["bf16_tail"], "yaml_file": ["write_precision_file"]},
    )
