"""Read, verify, write and resume Megatron checkpoint folders, without Megatron.

folders.py    DIR/latest_checkpointed_iteration.txt and DIR/iter_*
unpickle.py   pickles, without importing what they name
metadata.py   the index of a torch_dist folder: tensors, their chunks, objects
archive.py    the zip archives of torch.save
read.py       tensors and objects inside an archive
write.py      archives and the index of a torch_dist folder
structure.py  structural check: names, sizes, chunks that tile their tensors
integrity.py  full check: every CRC32
resume.py     repair the tracker before a run starts
state.py      what a checkpoint says about the run that saved it
check.py      describe a checkpoint and verify its files
remote.py     folders behind URLs and Hugging Face ids
convert/      to Hugging Face and back

Only the standard library is imported.
"""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.into_model import load_base as load_base
    from megatron_nemotron3.checkpoints.convert.omni_config import omni_json as omni_json
    from megatron_nemotron3.checkpoints.convert.quantized_config import hf_quant_config as hf_quant_config
    from megatron_nemotron3.checkpoints.convert.quantized_config import read_scales as read_scales
    from megatron_nemotron3.checkpoints.convert.quantized_recipes import quantization as quantization
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "convert.into_model": ["load_base"],
            "convert.omni_config": ["omni_json"],
            "convert.quantized_config": ["hf_quant_config", "read_scales"],
            "convert.quantized_recipes": ["quantization"],
        },
    )
