"""The catalogue of seeded faults: what a proof must find, in which launch, and by which property.

A fault is a patch of Megatron or of this package, active on the ranks of a test alone, or damage to a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.proof.certify import checkpoint_faults as checkpoints
from tests.proof.certify import definition_faults as everywhere
from tests.proof.certify import expert_faults as experts
from tests.proof.certify import gradient_faults as gradients
from tests.proof.certify import launch_faults as launches
from tests.proof.certify import precision_faults as precision
from tests.proof.certify import script_faults as script
from tests.proof.certify import sequence_faults as sequence

OPTION = "--te-precision-config-file"
RECIPES = Path(__file__).parents[2] / "golden" / "recipes"
#: A launch of the Super form: latent experts, shared expert, MTP of two depths from one block.
_MODEL = """--hidden-size 4096 --ffn-hidden-size 2688 --num-attention-heads 32 --group-query-attention
--num-query-groups 2 --kv-channels 128 --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128
--mamba-num-groups 8 --squared-relu --normalization RMSNorm --norm-epsilon 1e-05 --disable-bias-linear
--untie-embeddings-and-output-weights --position-embedding-type none --init-method-std 0.014
--num-experts 512 --moe-ffn-hidden-size 2688 --moe-shared-expert-intermediate-size 5376
--moe-latent-size 1024 --moe-router-topk 22 --moe-router-topk-scaling-factor 5.0
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.001
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --mtp-num-layers 2
--mtp-use-repeated-layer --mtp-loss-scaling-factor 0.3 --moe-token-dispatcher-type alltoall
--seq-length 8192 --micro-batch-size 1 --global-batch-size 3072 --weight-decay 0.1 --clip-grad 0.1
--attention-dropout 0.0 --hidden-dropout 0.0"""
_TOKEN = "--calculate-per-token-loss"
_BF16 = f"--bf16 --moe-router-dtype fp32 {_TOKEN}"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Launch:
    """A launch, as a user would give it."""

    #: Options that differ between launches.
    options: str = ""
    ranks: int = 2
    pattern: str = "MEM*E"
    #: The command line of this recipe instead.
    recipe: str = ""
    gpu: str = "h100"
    #: Lengths of documents, and of the places in which they lie inside a pack; None: those of the proxy.
    documents: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None

    def text(self, folder: Path) -> str:
        """Return Megatron's command line, and write its precision file to a folder."""
        if not self.recipe:
            return f"{_MODEL} --hybrid-layer-pattern '{self.pattern}/*E/*E' {self.options}"
        words = (RECIPES / f"{self.recipe}.txt").read_text().split("\n--spec ")[1].replace("\n", " ")
        if OPTION not in words:
            return f"--spec {words}"
        launches.write_file(folder, self.recipe.partition("-")[0])
        return f"--spec {words} {OPTION} {folder / launches.FILE}"


LAUNCHES: dict[str, Launch] = {
    "TP2": Launch(f"--tensor-model-parallel-size 2 --sequence-parallel {_TOKEN}"),
    "TP2 EP2": Launch(
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {_TOKEN}"
    ),
    "EP2": Launch(f"--expert-model-parallel-size 2 --use-distributed-optimizer {_TOKEN}"),
    "PP2": Launch(f"--pipeline-model-parallel-size 2 {_TOKEN}", pattern="MEM|*E"),
    "PP2 VPP2": Launch(f"--pipeline-model-parallel-size 2 {_TOKEN}", pattern="ME|M*|EM|*E"),
    "CP2": Launch(f"--context-parallel-size 2 --eod-mask-loss {_TOKEN}"),
    "CP2 packed": Launch(f"--context-parallel-size 2 --sft {_TOKEN}"),
    "CP2, padded documents": Launch(
        f"--context-parallel-size 2 --sft {_TOKEN}", documents=(21, 5, 30), padded=(24, 8, 32)
    ),
    "DP2": Launch(f"{_OVERLAP} --eod-mask-loss {_TOKEN}"),
    "DP2 per batch": Launch(_OVERLAP),
    "DP4, 2 optimizers": Launch(f"{_OVERLAP} --num-distributed-optimizer-instances 2 {_TOKEN}", ranks=4),
    "Super, NVFP4": Launch(ranks=0, recipe="super-nvfp4"),
    "Super": Launch(ranks=0, recipe="super-pretrain", gpu="b200"),
    "TP2, BF16": Launch(f"--tensor-model-parallel-size 2 --sequence-parallel {_BF16}"),
    "TP2 EP2, BF16": Launch(
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {_BF16}"
    ),
    "DP2, BF16": Launch(f"{_OVERLAP} {_BF16}"),
    "DP2, recomputed": Launch(f"--recompute-granularity selective --recompute-modules moe {_TOKEN}"),
}


@dataclass(frozen=True)
class Fault:
    """Something wrong that no error message reports."""

    #: The patch, or for a launch that is damaged itself what damages it; its docstring says what is wrong.
    patch: Callable[[], None] | Callable[[Path], str]
    #: A key of LAUNCHES.
    launch: str
    #: Properties of which all must fail.
    found_by: tuple[str, ...]
    #: A report of the same fault in real code, or "seeded".
    source: str = "seeded"
    #: The stage of the proof that must find it.
    stage: str = "layouts"
    #: Whether it is a fault in one process, too.
    everywhere: bool = False

    @property
    def what(self) -> str:
        """What is wrong, as a sentence."""
        assert self.patch.__doc__
        return " ".join(self.patch.__doc__.split())


_COPIES = ("copies on several ranks",)
_GRADIENTS, _NORM, _LOSS, _WEIGHTS = ("gradients",), ("gradient norms",), ("losses",), ("weights",)
_BIAS, _MTP, _FORMATS = ("expert biases",), ("losses of MTP",), ("number formats",)
_LOADED, _STATE = ("weights loaded",), ("optimizer state loaded",)


def _defined(
    patch: Callable[[], None], found_by: tuple[str, ...], source: str = "seeded", launch: str = "TP2"
) -> Fault:
    """Return a fault that every layout has: the definition finds it in one process."""
    return Fault(patch, launch, found_by, source, stage="definition", everywhere=True)


def _script(patch: Callable[[], None], found_by: str, launch: str = "DP2") -> Fault:
    """Return a fault that the script has in every layout: the definition of its steps finds it."""
    return Fault(patch, launch, (found_by,), stage="one process", everywhere=True)


def _own(patch: Callable[[], None], launch: str, *found_by: str) -> Fault:
    """Return a fault of the launch's own precision or initialization."""
    return Fault(patch, f"{launch}, BF16", found_by, stage="own precision")


FAULTS: dict[str, Fault] = {
    "norm gains under SP": Fault(gradients.norms_not_reduced, "TP2", _COPIES),
    "latent projections under SP": Fault(gradients.latent_not_reduced, "TP2", _COPIES),
    "router under SP": Fault(gradients.router_not_reduced, "TP2", _COPIES),
    "norm gains summed twice": Fault(gradients.norms_reduced_twice, "TP2", _GRADIENTS),
    "shared embedding at PP": Fault(gradients.embedding_not_tied, "PP2", _COPIES),
    "second chunk not divided": Fault(gradients.only_first_chunk_finalized, "PP2 VPP2", _COPIES),
    "experts times EP": Fault(gradients.experts_scaled_by_ep, "EP2", _GRADIENTS),
    "experts summed as dense": Fault(gradients.experts_summed_as_dense, "EP2", _GRADIENTS),
    "mean over DP": Fault(gradients.averaged_over_dp, "DP2", _GRADIENTS),
    "tokens of one rank": Fault(gradients.tokens_of_one_rank, "DP2", _COPIES),
    "tokens of the last stage": Fault(gradients.tokens_not_sent_to_stages, "PP2", _COPIES),
    "loss scale with accumulation": Fault(
        gradients.divided_by_microbatches, "DP2", _GRADIENTS, everywhere=True
    ),
    "bucket not reduced": Fault(gradients.last_bucket_not_reduced, "DP2", _COPIES),
    "optimizer instances": Fault(gradients.instances_not_reduced, "DP4, 2 optimizers", _COPIES),
    "stale gathered weights": Fault(gradients.stale_gathered_weights, "DP2", _LOSS),
    "shard one too short": Fault(gradients.shard_ends_early, "DP2", _WEIGHTS),
    "duplicates in the norm": Fault(
        gradients.duplicates_in_norm, "TP2", _NORM, "TransformerEngine (ROCm) #715"
    ),
    "head vectors in the norm": Fault(
        gradients.head_vectors_missing_in_norm, "TP2", _NORM, "Megatron-LM #7452, finding 8"
    ),
    "experts in the norm": Fault(gradients.experts_missing_in_norm, "TP2 EP2", _NORM, "Megatron-LM #5916"),
    "experts not clipped": Fault(gradients.experts_not_clipped, "EP2", _WEIGHTS),
    "norm of one stage": Fault(gradients.norm_of_one_stage, "PP2", _COPIES),
    "counts of one rank": Fault(experts.counts_of_one_rank, "DP2", _COPIES),
    "counts without CP": Fault(experts.counts_without_cp, "CP2", _COPIES),
    "counts of one micro-batch": Fault(experts.counts_of_last_microbatch, "DP2", _BIAS, everywhere=True),
    "counts in BF16": Fault(
        experts.counts_in_bf16,
        "DP4, 2 optimizers",
        _BIAS,
        "prime-rl #2338, Megatron-LM #1482",
        everywhere=True,
    ),
    "balance times TP": Fault(experts.balance_times_tp, "TP2", _GRADIENTS),
    "balance of local tokens": Fault(experts.balance_of_local_tokens, "TP2", _GRADIENTS),
    "balance per micro-batch": Fault(
        experts.balance_not_averaged, "DP2 per batch", _GRADIENTS, everywhere=True
    ),
    "shared expert per TP rank": Fault(experts.shared_expert_per_tp_rank, "TP2", _LOSS),
    "tokens at other experts": Fault(experts.dispatched_to_neighbor, "EP2", _LOSS),
    "parts of experts averaged": Fault(experts.expert_parts_averaged, "TP2", _LOSS),
    "probabilities of other tokens": Fault(experts.probabilities_of_other_experts, "EP2", _LOSS),
    "recompute routes anew": Fault(experts.recompute_routes_anew, "DP2, recomputed", _GRADIENTS),
    "CP positions shifted": Fault(sequence.cp_positions_shifted, "CP2", _LOSS),
    "CP order of Mamba": Fault(sequence.cp_tokens_in_rank_order, "CP2", _LOSS),
    "CP order of documents": Fault(sequence.cp_document_order, "CP2 packed", _LOSS),
    "CP heads shifted": Fault(sequence.cp_heads_shifted, "CP2", _LOSS),
    "CP gradients of keys": Fault(sequence.cp_kv_gradient_local, "CP2", _GRADIENTS, "Megatron-LM #1464"),
    "MTP tokens of a CP rank": Fault(
        sequence.mtp_tokens_of_cp_rank, "CP2", _MTP, "Megatron-LM #7452, finding 3; #7498"
    ),
    "MTP at borders without padding": Fault(
        sequence.mtp_borders_without_padding, "CP2, padded documents", _MTP, "Megatron-LM #6205, #4495"
    ),
    "last layer of a stage": Fault(sequence.stage_drops_last_layer, "PP2", _LOSS),
    "key and value swapped": Fault(sequence.key_and_value_swapped, "TP2", _LOSS),
    "logits gathered": Fault(sequence.logits_gathered, "TP2", _LOSS, "Megatron-LM #7452"),
    "shared expert twice": _defined(everywhere.shared_expert_twice, ("logits",)),
    "state lost between chunks": _defined(everywhere.state_lost_between_chunks, ("logits",)),
    "crowded expert drops a token": _defined(everywhere.crowded_expert_drops, ("logits",)),
    "expert bias weighs": _defined(everywhere.bias_weighs, ("logits",)),
    "expert bias ignored": _defined(everywhere.bias_does_not_choose, ("router choices",)),
    "experts counted in a byte": _defined(everywhere.experts_counted_in_a_byte, ("router choices",)),
    "expert bias in the wrong direction": _defined(everywhere.bias_moves_the_wrong_way, _BIAS),
    "MTP weighs twice": _defined(everywhere.mtp_weighs_twice, _GRADIENTS, "Megatron-LM #1532"),
    "balance weighs twice": _defined(everywhere.balance_weighs_twice, _GRADIENTS),
    "MTP's balance per depth": _defined(everywhere.mtp_is_no_mtp, _GRADIENTS, "Megatron-LM #6748"),
    "tokens of some micro-batches": _defined(everywhere.tokens_of_two_microbatches, _GRADIENTS),
    "norm gains decay": _defined(everywhere.everything_decays, ("optimizer",)),
    "small gradients scaled up": _defined(everywhere.small_gradients_are_scaled_up, ("optimizer",)),
    "norm counts twice": _defined(everywhere.norm_counts_twice, _NORM),
    "MTP without the loss mask": _defined(sequence.mtp_without_mask, _MTP, "Megatron-Bridge #6103, #6105"),
    "documents without index": _defined(
        everywhere.mamba_ignores_borders, ("logits",), "SkyRL #2056", "CP2 packed"
    ),
    "Mamba's state leaks": _defined(sequence.mamba_state_leaks, ("logits",), launch="CP2 packed"),
    "convolution leaks": _defined(sequence.convolution_leaks, ("logits",), launch="CP2 packed"),
    "attention leaks": _defined(sequence.attention_leaks, ("logits",), launch="CP2 packed"),
    "MTP labels of the next document": _defined(everywhere.mtp_ignores_borders, _MTP, launch="CP2 packed"),
    "one master not copied": _own(precision.one_master_not_copied, "DP2", "model and master weights"),
    "masters truncated": _own(precision.masters_truncated, "TP2", "model and master weights"),
    "tensor ranks seeded alike": _own(precision.tensor_ranks_seeded_alike, "TP2", "draws that differ"),
    "expert ranks seeded alike": _own(precision.expert_ranks_seeded_alike, "TP2 EP2", "draws that differ"),
    "routers drawn apart": _own(precision.routers_drawn_apart, "TP2", "copies on several ranks"),
    "outputs not scaled": _own(precision.outputs_not_scaled, "DP2", "initialization"),
    "narrow decays": _own(precision.narrow_decays, "TP2", "initialization"),
    "expert biases in BF16": _own(precision.biases_in_bf16, "TP2", "dtype of expert biases"),
    "routers in BF16": _own(precision.routers_in_bf16, "TP2", "dtype of routers"),
    "gradients summed in BF16": _own(precision.gradients_summed_in_bf16, "DP2", "dtype of summed gradients"),
    "experts step twice": _own(precision.experts_step_twice, "TP2 EP2", "steps of the optimizer"),
    "last loss logged": _script(script.last_loss_logged, "losses (script)"),
    "validation per micro-batch": _script(script.validation_per_microbatch, "validation loss (script)"),
    "biases ignored in evaluation": _script(script.biases_ignored_in_evaluation, "router choices"),
    "balance logged per step": _script(script.balance_logged_per_step, "losses of routers (script)"),
    "labels not shifted": _script(script.labels_not_shifted, "targets"),
    "vectors keep their rate": _script(script.vectors_keep_their_rate, "weights after two steps (script)"),
    "rate decays as a cosine": _script(script.rate_decays_as_cosine, "learning rates (script)"),
    "samples counted twice": _script(script.samples_counted_twice, "counts of the log"),
    "parameter norm of copies": Fault(
        script.parameter_norm_of_copies, "TP2", ("parameter norms (script)",), stage="script"
    ),
    "matcher not enabled": Fault(launches.enabled_dropped, "Super, NVFP4", _FORMATS, stage="formats"),
    "glob that matches nothing": Fault(
        launches.glob_matches_nothing, "Super, NVFP4", _FORMATS, stage="formats"
    ),
    "matcher missing": Fault(launches.matcher_dropped, "Super, NVFP4", _FORMATS, stage="formats"),
    "precision file without matchers": Fault(
        launches.file_dropped, "Super, NVFP4", _FORMATS, stage="formats"
    ),
    "tail counted per stage": Fault(
        launches.tail_counted_per_stage, "Super, NVFP4", _FORMATS, "Megatron-Bridge #3095", stage="formats"
    ),
    "memory exceeded": Fault(launches.memory_exceeded, "Super", ("memory of a GPU",), stage="memory"),
    "optimizer state between buckets": Fault(
        launches.buckets_shifted, "PP2", ("rules",), "Megatron-LM #5077", stage="rules"
    ),
    "moments forgotten": Fault(checkpoints.moments_forgotten, "TP2", _STATE, stage="resuming"),
    "layers exchanged": Fault(checkpoints.layers_exchanged, "TP2", _LOADED, stage="resuming"),
    "expert biases reset": Fault(
        checkpoints.biases_reset, "TP2", ("weights after resuming",), stage="resuming"
    ),
    "part of a matrix not saved": Fault(
        checkpoints.part_not_saved, "TP2", ("weights in the checkpoint",), stage="saving"
    ),
    "other factor stored": Fault(
        checkpoints.other_factor_stored, "TP2", ("Hugging Face export",), stage="saving"
    ),
    "experts exchanged in the export": Fault(
        checkpoints.experts_exchanged_in_export, "TP2", ("Hugging Face export",), stage="export"
    ),
    "A exported for its logarithm": Fault(
        checkpoints.decay_exported_as_rate, "TP2", ("Hugging Face export",), stage="export"
    ),
}
