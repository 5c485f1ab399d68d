"""Names, fusions and cuts of the parameters of vLLM's and SGLang's NemotronH models.

Facts read from their sources, and nothing else of them:

    vllm-project/vllm    models/nemotron_h.py and layers/mamba/mamba_mixer2.py at 00b08dc4,
                         models/nemotron_h_mtp.py at 01ca2773, layers/fused_moe/routed_experts.py at 002d6073
    sgl-project/sglang   models/nemotron_h.py at 02c60328, models/nemotron_h_mtp.py at 008b79d2,
                         distributed/utils.py at 1107be11

Shapes are those in which the engines create the parameters. Kernels that reorder a weight after loading need
the engine's own `load_weights`, which takes the whole tensors of engine "hf". Under SGLang's DP attention the
Mamba layers are cut over the attention ranks, too. What both engines' own loaders make of a refit on a CPU is
in tests/golden/engine_parameters.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The ranks over which a tensor is cut: those of an attention group, all tensor ranks, those that share an
#: expert, or those of the embedding or output layer.
Role = Literal["attention", "mlp", "shared", "experts", "embedding", "head", "whole"]
#: Pipeline stages that hold a tensor outside the layers.
Stages = Literal["first", "last", "all"]
#: Rows of a vocabulary are padded to a multiple of this, in both engines.
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class EngineParameter:
    """How an engine holds one tensor of Hugging Face's; q, k and v are one parameter, in this order.

    name: relative to the layer, as in `models.tensors`. stacked: experts are an additional first axis.
    negated_exp: holds -exp(tensor), FP32.
    """

    name: str
    role: Role
    stacked: bool = False
    negated_exp: bool = False


#: Tensors whose name below the layer is that of both engines, by role.
_SAME: dict[Role, str] = {
    "attention": "mixer.in_proj.weight mixer.conv1d.weight mixer.conv1d.bias mixer.D mixer.dt_bias "
    "mixer.norm.weight mixer.out_proj.weight mixer.o_proj.weight eh_proj.weight",
    "whole": "norm_f.weight norm.weight enorm.weight hnorm.weight final_layernorm.weight mixer.gate.weight "
    "mixer.gate.e_score_correction_bias mixer.fc1_latent_proj.weight mixer.fc2_latent_proj.weight",
    "shared": "mixer.shared_experts.up_proj.weight mixer.shared_experts.down_proj.weight",
    "mlp": "mixer.up_proj.weight mixer.down_proj.weight",
    "head": "lm_head.weight",
}
#: Name in Hugging Face's checkpoint, below the layer -> parameter of both engines.
PARAMETERS = {
    name: EngineParameter(name, role) for role, names in _SAME.items() for name in names.split()
} | {
    "embeddings.weight": EngineParameter("embed_tokens.weight", "embedding"),
    "mixer.A_log": EngineParameter("mixer.A", "attention", negated_exp=True),
    **{f"mixer.{x}_proj.weight": EngineParameter("mixer.qkv_proj.weight", "attention") for x in "qkv"},
    "mixer.experts.{e}.up_proj.weight": EngineParameter("mixer.experts.w13_weight", "experts", stacked=True),
    "mixer.experts.{e}.down_proj.weight": EngineParameter("mixer.experts.w2_weight", "experts", stacked=True),
}


@dataclass(frozen=True)
class EngineNames:
    """What differs between the engines.

    outside: stages with the embedding, and stages with the final norm and the output layer. last_first: the
    layers that a division leaves over go to the last stages; otherwise to those before the last. experts: the
    module that holds the experts.
    """

    outside: tuple[Stages, Stages]
    last_first: bool
    experts: str

    def parameter_name(self, parameter: EngineParameter, prefix: str) -> str:
        name = parameter.name.replace("mixer.experts.", self.experts)
        if name == "lm_head.weight":
            return name
        if prefix.startswith("mtp."):
            return "draft.model." + prefix.removeprefix("mtp.") + name
        return "model." + prefix.removeprefix("backbone.").removeprefix("model.") + name

    def layers(self, number: int, stages: int) -> list[int]:
        each, left = divmod(number, stages)
        sizes = [each] * stages
        first = stages - left if self.last_first else stages - 1 - left
        for stage in range(first, first + left):
            sizes[stage] += 1
        return sizes


ENGINES: dict[str, EngineNames] = {
    "vllm": EngineNames(("all", "all"), False, "mixer.experts.routed_experts."),
    "sglang": EngineNames(("first", "last"), True, "mixer.experts."),
    # Whole tensors under Hugging Face's names, which the engines' `load_weights` takes.
    "hf": EngineNames(("first", "first"), True, ""),
}
