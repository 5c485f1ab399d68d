"""For every rule: what Megatron does where the rule would have said no. docs/reference/rules.md shows it.

Each entry holds the smallest run that violates the rule. With the rules off, Megatron either refuses it
itself (`Refused`), or takes it and computes something else than asked (`Wrong`, with the number), or only a
machine with a GPU and Transformer Engine could tell (`NotShown`, with the reason).
"""

from __future__ import annotations

from tests.properties import measure, measure_options
from tests.properties.entries import (
    ALIGNED,
    FULL,
    MTP,
    SELECTIVE,
    Evidence,
    NotShown,
    Refused,
    Wrong,
    case,
    model,
    quantized,
    schedule,
)
from tests.properties.evidence_combination import COMBINATIONS
from tests.properties.evidence_performance import PERFORMANCE

EVIDENCE: dict[str, Evidence] = {
    "pattern-dash": Refused(
        case=case(model("-M")),
        stage="arguments",
        message="argument --hybrid-layer-pattern: expected one argument",
    ),
    "heads-tp": Refused(
        case=case(model(num_attention_heads=3, num_query_groups=1), tp=2),
        stage="model",
        message="num_attention_heads (3) must be a multiple of tensor_model_parallel_size (2)",
    ),
    "query-groups-tp": Refused(
        case=case(model(num_attention_heads=6, num_query_groups=3), tp=2),
        stage="model",
        message="num_query_groups (3) must be a multiple or divisor of tensor_model_parallel_size (2)",
    ),
    "qkv-tp": Refused(
        case=case(
            model("*", num_attention_heads=6, num_query_groups=1, hidden_size=18, vocab_size=33),
            tp=3,
            schedule=schedule(seq_length=9),
        ),
        stage="model",
        message="32 is not divisible by 3",
    ),
    "mamba-heads-tp": Refused(
        case=case(model(mamba_num_heads=3, mamba_num_groups=1), tp=2),
        stage="model",
        message="nheads must be evenly divisble by tp_size",
        pretend=measure.mamba_ssm,
        along=("mamba-groups-tp",),
    ),
    "mamba-groups-tp": Refused(
        case=case(model(mamba_num_groups=1), tp=2),
        stage="model",
        message="ngroups must be evenly divisible by tp_size",
        pretend=measure.mamba_ssm,
    ),
    "dense-ffn-tp": Refused(
        case=case(model(dense_ffn_hidden_size=7), tp=2), stage="model", message="7 is not divisible by 2"
    ),
    "shared-expert-tp": Refused(
        case=case(model(moe_shared_expert_intermediate_size=5), tp=2),
        stage="model",
        message="5 is not divisible by 2",
    ),
    "expert-ffn-etp": Refused(
        case=case(model(moe_ffn_hidden_size=3), etp=2, dp=2),
        stage="model",
        message="3 is not divisible by 2",
        pretend=measure.upstream_experts,
    ),
    "experts-ep": Refused(
        case=case(model(num_moe_experts=3), ep=2, dp=2),
        stage="arguments",
        message="Number of experts should be a multiple of expert model parallel_size.",
    ),
    "mtp-hidden-tp": Refused(
        case=case(model(hidden_size=15, **MTP), tp=2), stage="model", message="15 is not divisible by 2"
    ),
    "vocabulary-tp": Wrong(
        case=case(model(vocab_size=33), tp=2),
        measured=measure.rows,
        shown="embedding and output layer have 256 rows, not 33",
    ),
    "mamba-heads-cp": Refused(
        case=case(model(mamba_num_heads=3, mamba_num_groups=1), cp=2),
        stage="model",
        message="nheads must be evenly divisible by tp_size * cp_size",
    ),
    "mamba-groups-cp": Refused(
        case=case(model(mamba_num_heads=6, mamba_num_groups=3), cp=2),
        stage="model",
        message="ngroups must be evenly divisible by tp_size * cp_size",
    ),
    "experts-without-moe": Wrong(
        case=case(model("M*-"), ep=2, dp=2),
        measured=measure.expert_groups,
        shown="without the option EP is 1; with it: AssertionError: num_experts must be non None to use "
        "expert model parallelism",
    ),
    "expert-grid": Refused(
        case=case(ep=4, dp=2),
        stage="groups",
        message="world_size (2) is not divisible by expert_tensor_model_pipeline_parallel size (4)",
    ),
    "layers-pipeline": Wrong(
        case=case(model("M"), pp=2),
        measured=measure.empty_stage,
        shown="trains, with 1292 and 0 weights of layers on the stages",
    ),
    "vpp-without-pp": Refused(
        case=case(vpp=2), stage="arguments", message="pipeline-model-parallel size should be greater than 1"
    ),
    "moe-tp-without-sp": Refused(
        case=case(tp=2, sp=False),
        stage="step",
        message="performance may degrade if MoE and tensor parallelismare enabled without",
    ),
    "sp-without-tp": Wrong(
        case=case(sp=True), measured=measure.sequence_parallel, shown="sequence_parallel becomes False"
    ),
    "sequence-cp": Refused(
        case=case(cp=2, schedule=schedule(seq_length=6)),
        stage="arguments",
        message="seq-length should be a multiple of 2 * context-parallel-size",
    ),
    "sequence-sp": Refused(
        case=case(tp=2, schedule=schedule(seq_length=7)),
        stage="step",
        message="First dimension of the tensor should be divisible by tensor parallel size",
    ),
    "conv-kernel": Wrong(
        case=case(model(mamba_conv_kernel=3)),
        measured=measure.elements,
        shown="4108 weights are built, 4076 are meant",
    ),
    "gated-norm-epsilon": Wrong(
        case=case(model(layernorm_epsilon=1e-3)),
        measured=measure.epsilons,
        shown="norms have the epsilons 0.001 and 1e-05",
    ),
    "global-batch": Refused(
        case=case(dp=2, schedule=schedule(global_batch_size=3)),
        stage="arguments",
        message="must be divisible by eval_micro_batch_size (1) * data_parallel_size (2)",
    ),
    "vpp-microbatches": Refused(
        case=case(pp=2, vpp=2, schedule=schedule(global_batch_size=3)),
        stage="step",
        message="should be 0, or larger than or equal to the pipeline-parallel size, but it is 1.",
    ),
    "learning-rate-order": Refused(
        case=case(schedule=schedule(lr=1e-5, min_lr=1e-3)), stage="arguments", message="AssertionError"
    ),
    "warmup-length": Refused(
        case=case(schedule=schedule(lr_warmup_iters=2)), stage="step", message="AssertionError"
    ),
    "wsd-decay-length": Wrong(
        case=case(schedule=schedule(lr_wsd_decay_iters=None)),
        measured=measure.decay_style,
        shown="the learning rate decays linear, not WSD",
    ),
    "schedule-unknown": Refused(
        case=case(schedule=schedule(train_iters=None, lr_decay_iters=None, lr_wsd_decay_iters=1)),
        stage="step",
        message="either train-iters or train-samples should be provided",
    ),
    "nvfp4-without-file": Wrong(
        case=quantized("nvfp4", te_precision_config_file=None),
        measured=measure.exempt_modules,
        shown="fp4=e2m1, quant_recipe=None: no module is exempt",
    ),
    "precision-file-torch": Wrong(
        case=case(precision="bf16", te_precision_config_file="precision.yaml"),
        measured=measure.precision_file_in_flags,
        shown="the file is not among the flags",
    ),
    "precision-file-unused": Wrong(
        case=case(None, "--te-precision-config-file", "precision.yaml", precision="bf16"),
        measured=measure.with_precision_file,
        shown="the loss is the same to the bit",
    ),
    "bf16-layers-range": Wrong(
        case=quantized("nvfp4", "--num-layers-at-end-in-bf16", "500"),
        measured=measure.bf16_layers,
        shown="4 of 4 layers are BF16",
    ),
    "fp8-bf16-layers-pipeline": Refused(
        case=quantized("mxfp8", "--num-layers-at-end-in-bf16", "3", pp=2),
        stage="model",
        message="num_layers_at_end_in_bf16 (3) must be between 0 and number of layers per pipeline stage (2)",
        pretend=measure.transformer_engine,
    ),
    "fp8-torch": Refused(
        case=quantized("mxfp8", backend="torch"),
        stage="model",
        message="Only transformer-engine>=1.7.0 supports MoE FP8 training",
    ),
    "delayed-bf16-layers": Refused(
        case=quantized("fp8-delayed", "--first-last-layers-bf16"),
        stage="model",
        message="Delayed scaling does not support first / last layer in BF16.",
        pretend=measure.transformer_engine,
    ),
    "delayed-recompute": Refused(
        case=quantized("fp8-delayed", *SELECTIVE, "layernorm"),
        stage="model",
        message="Delayed scaling does not support moe_act and layernorm recompute for fp8.",
        pretend=measure.transformer_engine,
    ),
    "fp8-param-gather": Refused(
        case=case(None, "--fp8-param-gather"),
        stage="model",
        message="fp8_param must be used together with fp8 mode.",
    ),
    "nvfp4-torch": Refused(
        case=quantized("nvfp4", backend="torch"),
        stage="arguments",
        message="--fp4-format requires Transformer Engine >= 2.7.0.dev0",
    ),
    "quantized-hardware": NotShown(
        case=quantized("nvfp4", compute_capability=(9, 0)),
        why="TE asks the GPU, and refuses below 10.0, when the first quantized layer runs",
    ),
    "emulate-other": Wrong(
        case=quantized("nvfp4", emulate=True),
        measured=measure.emulated,
        shown="fp4=None and TE's linears where they are: everything is BF16",
    ),
    "weight-alignment": Refused(
        case=quantized("mxfp8", config=model("M")),
        stage="model",
        message="dimension of the Mamba layer input projection output tensor must be a multiple of 16",
        pretend=measure.mamba_ssm_and_transformer_engine,
    ),
    "fp4-row-alignment": NotShown(
        case=quantized("nvfp4", config=model(**{**ALIGNED, "moe_ffn_hidden_size": 48})),
        why="the FP4 GEMMs run on a GPU only; Megatron pads tokens to 32 for them (get_fp4_align_size)",
    ),
    "blockwise-alignment": NotShown(
        case=quantized("fp8-blockwise", config=model(**{**ALIGNED, "moe_ffn_hidden_size": 48})),
        why="the FP8 GEMMs run on a GPU only; TE's documentation asks for multiples of 128, its tests do not",
    ),
    "partial-blocks": NotShown(
        case=quantized("mxfp8", config=model("M"), backend="torch", emulate="mxfp8"),
        why="TE's MXFP8 quantizer asserts multiples of 32 on a GPU only",
    ),
    "token-alignment": NotShown(
        case=quantized("nvfp4", schedule=schedule(seq_length=8)),
        why="TE's quantizers run on a GPU only; they assert that the rows fill blocks",
    ),
    "reserved-option": Refused(
        case=case(None, "--seq-length", "7", tp=2),
        stage="step",
        message="First dimension of the tensor should be divisible by tensor parallel size",
    ),
    "model-option": Wrong(
        case=case(model("ME"), "--moe-ffn-hidden-size", "16"),
        measured=measure.elements,
        shown="4588 weights are built, 3052 are meant",
    ),
    "gpt-pipeline-option": Wrong(
        case=case(None, "--num-layers", "4"),
        measured=measure.gpt_options,
        shown="refuses 8 of 10 such options, ignores --num-layers, --mtp-hybrid-override-pattern",
    ),
    "documents-cp": Wrong(
        case=case(model("M", **MTP), "--dataloader-inter-document-masking", cp=2, backend="te"),
        measured=measure.rolled_documents,
        shown="MTP's shift to the next token is wrong for 7 of 16 tokens",
    ),
    "packed-cp-torch": Wrong(
        case=case(None, "--sft", cp=2),
        measured=measure.packed_batch,
        shown="cutting the batch: AttributeError: 'NoneType' object has no attribute "
        "'thd_get_partitioned_indices'",
        along=("masked-mean-cp",),
    ),
    "recompute-layernorm-torch": Refused(
        case=case(None, *SELECTIVE, "layernorm"),
        stage="step",
        message="NameError: name 'FP8GlobalStateManager' is not defined",
    ),
    "recompute-moe-act": Refused(
        case=case(None, *SELECTIVE, "moe_act"),
        stage="model",
        message="moe_act in recompute_modules is only supported with moe_grouped_gemm.",
    ),
    "recompute-mtp": Refused(
        case=case(model(**MTP), *FULL, "2"),
        stage="step",
        message="recompute_num_layers must be 1 for MTP recompute",
    ),
    "padding-allgather": Refused(
        case=quantized("mxfp8", "--moe-token-dispatcher-type", "allgather"),
        stage="model",
        message="allgather and alltoall_seq dispatcher does not support moe_router_padding_for_quantization.",
        pretend=measure.transformer_engine,
    ),
    "moe-shared-expert-overlap": Refused(
        case=case(model(moe_latent_size=8), "--moe-shared-expert-overlap", backend="auto"),
        stage="step",
        message="Shared expert overlap with MoE latent projections is not supported during training.",
        pretend=measure.upstream_moe,
    ),
    "overlap-moe-expert-parallel-comm": Refused(
        case=case(None, "--overlap-moe-expert-parallel-comm", ep=2, dp=2, precision="bf16"),
        stage="step",
        message="find attribute build_schedule_plan",
    ),
    "use-transformer-engine-op-fuser": NotShown(
        case=quantized("nvfp4", "--use-transformer-engine-op-fuser", config=model(**ALIGNED, **MTP)),
        why="the fused expert path is TE code for a GPU, and takes its format from the variable FP4_RECIPE",
    ),
    "fp4-param-gather": Refused(
        case=case(None, "--fp4-param-gather"),
        stage="arguments",
        message="--fp4-param-gather must be used together with --fp4-format.",
    ),
    "moe-router-force-biased": Wrong(
        case=case(None, "--moe-router-force-biased", "-0.1"),
        measured=measure.biases_of_routers,
        shown="two forwards of a process add one bias, and those of a process that begins later another",
        along=("option-benchmark",),
    ),
    "cuda-graph-draws": NotShown(
        case=case(None, "--cuda-graph-impl", "full_iteration", "--hidden-dropout", "0.1"),
        why="only a GPU has CUDA graphs",
    ),
    "yaml-cfg": Refused(
        case=case(None, "--yaml-cfg", "run.yaml"),
        stage="arguments",
        message="AttributeError",
        pretend=measure.yaml_file,
    ),
    "grad-reduce-in-bf16": Wrong(
        case=case(model(**MTP), "--grad-reduce-in-bf16"),
        measured=measure.bf16_gradient,
        shown="MTP's share of the output layer's gradient is off by more than 1 %",
    ),
    "use-checkpoint-args": Wrong(
        case=case(None, "--use-checkpoint-args"),
        measured=measure.checkpoint_arguments,
        shown="--spec megatron_nemotron3.specs nemotron3_torch_stack_spec becomes another.specs stack",
    ),
    "moe-per-layer-logging": Wrong(
        case=case(model(**MTP), "--moe-per-layer-logging"),
        measured=measure.router_slots,
        shown="slots with a value, depths 1: yes, 2: no",
    ),
    "option-refused": Wrong(
        case=case(None, "--reset-attention-mask"),
        measured=measure_options.refused,
        shown="trains the same with 12 such options together; under the mask of --reset-attention-mask the "
        "logits of a second document do not change, and are not those of this document alone; --qk-clip and "
        "--defer-embedding-wgrad-compute end in AttributeError and AttributeError",
    ),
    "option-benchmark": Wrong(
        case=case(None, "--moe-router-force-load-balancing"),
        measured=measure_options.forced,
        shown="experts are drawn at random, and the loss is another one",
    ),
    "option-unused": Wrong(
        case=case(model(**MTP), "--kv-lora-rank", "8", "--retriever-score-scaling"),
        measured=measure_options.unused,
        shown="trains the same with all 223 such options together",
    ),
    "option-layout": Wrong(
        case=case(None, "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1"),
        measured=measure_options.microbatches,
        shown="the gradient depends on --micro-batch-size; with seq_aux_loss it does not",
    ),
    "moe-router-bias-update-rate": Wrong(
        case=case(None, "--moe-router-bias-update-rate", "0"),
        measured=measure_options.biases,
        shown="of 4 biases a step moves 0, and 3 at the model's rate",
    ),
    **COMBINATIONS,
    **PERFORMANCE,
}
