"""Record what the peft library does: `python -m tests.golden.make_peft_adapter`.

Needs peft. It writes tests/golden/peft:

    adapter_config.json, adapter_model.safetensors    as peft saves them, after B was made random
    merged.safetensors                                the adapted weights after `merge_and_unload`
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.support.hf_folders import write_hf
from tests.support.peft_model import FOLDER, MODEL, RANK, TARGETS, base_values, hf_names, transformers_model


def main() -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as place:
        write_hf(Path(place) / "base", MODEL, values=base_values(), dtype="float32")
        model = transformers_model(Path(place) / "base")
    model.name_or_path = "base"
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=10, task_type="CAUSAL_LM", **TARGETS))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(FOLDER)
    (FOLDER / "README.md").unlink(missing_ok=True)
    merged = hf_names(adapted.merge_and_unload().state_dict())
    base = base_values()
    changed = {name: value for name, value in merged.items() if not value.equal(base[name])}
    save_file(changed, FOLDER / "merged.safetensors")


if __name__ == "__main__":
    main()
