"""The proxy of a launch: every option has a treatment, the structure stays, and what is lost is said."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3 import cpu_mode
from megatron_nemotron3.launch import Launch, ParallelLayout, command_line, parser
from megatron_nemotron3.launch import flags as flags_of
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.layers.chunked_scan import CHUNK
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.models.stack_specs import experts_text, stored_experts
from megatron_nemotron3.proof.certify.bench import Bench, PropertyState
from megatron_nemotron3.proof.certify.certificate import normalised
from megatron_nemotron3.proof.certify.definition import definition
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.layouts import Sizes, borders, chosen, cover, of_launch, shortened
from megatron_nemotron3.proof.certify.options import Treatment
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch, make, proxy_lines, stages_of
from megatron_nemotron3.train.build import megatron_args
from tests.properties.strategies import layouts

GOLDEN = Path(__file__).parents[2] / "golden"
RECIPES = sorted((GOLDEN / "recipes").glob("*.txt"))
SUPER = """
    torchrun --nproc-per-node 8 --nnodes 8 pretrain_hybrid.py
    --spec megatron_nemotron3.specs nemotron3_te_stack_spec
    --hybrid-layer-pattern "MEMEM*EMEME|MEM*EMEMEM|EMEMMEMM|EMEM*EMEME/*E/*E"
    --hidden-size 4096 --ffn-hidden-size 2688 --num-attention-heads 32 --group-query-attention
    --num-query-groups 2 --kv-channels 128 --mamba-num-heads 128 --squared-relu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type none
    --attention-dropout 0.0 --hidden-dropout 0.0 --num-experts 512 --moe-ffn-hidden-size 2688
    --moe-shared-expert-intermediate-size 5376 --moe-latent-size 1024 --moe-router-topk 22
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-load-balancing-type seq_aux_loss --mtp-num-layers 2 --mtp-use-repeated-layer
    --seq-length 8192 --max-position-embeddings 8192 --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --micro-batch-size 1 --global-batch-size 64 --bf16 --lr 1e-4
"""


def request(flags: Sequence[Flag], **known: Any) -> LaunchRequest:
    return LaunchRequest(flags=tuple(flags), **known)


def proxy_of(text: str, ranks: int = 8, **changes: int | None) -> ProxyLaunch:
    return make(request(command_line.read_launch(text).flags, world_size=changes.get("world_size")), ranks)


def recipe(file: Path) -> str:
    """The command of a recipe, as it is run: golden files have an option a line, without quotes."""
    lines = file.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("--spec"))
    end = next((i for i, line in enumerate(lines) if i > first and not line.startswith("--")), len(lines))
    words = " ".join(shlex.quote(word) for line in lines[first:end] for word in line.split())
    return f"torchrun --nproc-per-node 8 {words.join(('pretrain_hybrid.py ', ''))}"


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_every_option_of_megatron_has_one_treatment() -> None:
    """One line of the file is one option, with a treatment that the file describes."""
    lines = [line for line in parser.FILE.read_text().splitlines() if '"treatment": ' in line]
    table = parser.table()
    assert len(lines) == len(table["options"]) + len(table["treatments"]) > 900
    assert list(table["options"]) == sorted(table["options"])
    assert {row["treatment"] for row in table["options"].values()} == set(table["treatments"])


def test_an_unknown_option_is_kept_and_said() -> None:
    proxy = proxy_of(f"{SUPER} --moe-new-thing 3")
    assert proxy.treatments["--moe-new-thing"] is Treatment.KEPT
    assert option(proxy.arguments(None), "--moe-new-thing") == "3"
    assert any("not in the table" in r.what and r.options == ("--moe-new-thing 3",) for r in proxy.remarks)


def test_details_of_what_is_off_are_not_called_untested() -> None:
    off = "--cuda-graph-impl none --cuda-graph-warmup-steps 3 --moe-flex-dispatcher-num-sms 16"
    proxy = proxy_of(f"{SUPER} {off} --moe-token-dispatcher-type alltoall")
    assert {proxy.treatments[f"--{name}"] for name in ("cuda-graph-impl", "moe-flex-dispatcher-num-sms")} == {
        Treatment.DROPPED
    }
    proxy = proxy_of(f"{SUPER} {off} --moe-token-dispatcher-type flex".replace("impl none", "impl local"))
    said = {name for remark in proxy.remarks if remark.untested for name in remark.options}
    assert {
        "--cuda-graph-impl local",
        "--cuda-graph-warmup-steps 3",
        "--moe-token-dispatcher-type flex",
    } <= said
    assert option(proxy.arguments(proxy.sizes[0]), "--moe-token-dispatcher-type") == "alltoall"


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_option_of_a_recipe_has_a_treatment(file: Path) -> None:
    """What is replaced or not tested is in a remark; what is kept is in the words."""
    flags = command_line.read_launch(recipe(file)).flags
    proxy = make(request(flags), 8)
    said = {name.split()[0] for remark in proxy.remarks for name in remark.options}
    mechanism = {flag.name for flag in proxy.mechanism}
    for flag in flags:
        treatment = proxy.treatments[flag.name]
        assert (treatment in (Treatment.REPLACED, Treatment.UNTESTED)) == (flag.name in said), flag
        if treatment is Treatment.KEPT:
            assert flag.name in mechanism or flag.name in proxy.meaning, flag
    assert proxy_lines(proxy)


@pytest.mark.parametrize("file", RECIPES[:: len(RECIPES) // 2], ids=lambda file: file.stem)
def test_megatron_accepts_the_words_of_a_proxy(file: Path, tmp_path: Path) -> None:
    flags = command_line.read_launch(recipe(file)).flags
    proxy = make(request(flags), 8)
    bench = Bench(proxy=proxy, flags=tuple(flags), folder=tmp_path)
    for sizes in (None, *proxy.sizes):
        case = bench.case(sizes)
        with cpu_mode():
            args = megatron_args(case.argv(), case.layout.world_size)
        assert (args.bf16, args.attention_dropout, args.hidden_dropout) == (False, 0.0, 0.0)


def test_structure_of_a_launch() -> None:
    proxy = proxy_of(SUPER, world_size=64)
    config = proxy.config
    assert (
        config.moe_latent_size and config.moe_shared_expert_intermediate_size and config.mtp_num_layers == 2
    )
    assert (config.num_query_groups, config.num_moe_experts, config.moe_router_topk) == (2, 16, 3)
    # Three chunks of the scan and a rest: state is carried from chunk to chunk.
    assert 3 * CHUNK < proxy.case.seq_length < 4 * CHUNK
    features = frozenset().union(*(sizes.features for sizes in proxy.sizes))
    assert features == proxy.large.features
    assert not [remark for remark in proxy.remarks if "cuts between" in remark.what]
    for sizes in proxy.sizes:
        pattern = patterns.parse(stages_of(config, sizes.layout))
        assert len(pattern.stages) == sizes.layout.stages and pattern.mtp == ("*E", "*E")


@pytest.mark.parametrize(
    ("pattern", "count", "expected"),
    [
        # Every kind follows every kind that it follows in the launch.
        ("MEMEMEM*EMEMEMEME", 1, "MEM*E"),
        ("M-M-M-M*-M-M*", 1, "M-M*-M*"),
        # The stage without an expert stays one; the cut between * and E is kept.
        ("MEM*E|MEM*|EMEM|MMMM", 4, "MEM*E|MEM*|EM|MM"),
        # The last stage holds MTP alone.
        ("MEMEM*E|MEMEM*EME|/*E", 3, "MEM*E|MEM*E|"),
        ("MEMEM*E|MEMEM*EME|MEMEM*EM|/*E", 2, "MEM*E|"),
    ],
)
def test_short_stages(pattern: str, count: int, expected: str) -> None:
    whole = of_launch(pattern, pattern.count("|") + 1)
    short, _ = shortened(chosen(whole, count), whole)
    assert "|".join(short) == expected


def test_what_the_small_pipeline_lacks_is_said() -> None:
    cuts = "ME*|EM|*E|*M|EM|MM|EM|ME"
    text = SUPER.replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 8")
    proxy = proxy_of(text.replace("MEMEM*EMEME|MEM*EMEMEM|EMEMMEMM|EMEM*EMEME", cuts))
    large, small = (set(borders((text or "").split("|"))) for text in (cuts, proxy.config.source))
    said = next(remark.what for remark in proxy.remarks if remark.what.startswith("cuts between"))
    assert len(large & small) == len(small) == 2
    for one, other in large - small:
        assert f"{one} and {other}" in said


def test_stages_without_cuts_have_the_given_first_and_last_length() -> None:
    assert of_launch("MEMEMEMEM*", 4, first=1, last=3) == ["M", "EME", "MEM", "EM*"]


def test_megatron_fsdp_stays() -> None:
    text = SUPER.replace("--pipeline-model-parallel-size 4", "").replace("|", "")
    proxy = proxy_of(f"{text} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    words = proxy.arguments(proxy.sizes[0])
    assert "--use-megatron-fsdp" in words and option(words, "--ckpt-format") == "fsdp_dtensor"
    assert not {"--use-megatron-fsdp", "--ckpt-format"} & set(proxy.arguments(None))


def test_gradients_are_in_several_buckets() -> None:
    proxy = proxy_of(f"{SUPER} --use-distributed-optimizer --overlap-grad-reduce")
    assert int(option(proxy.arguments(proxy.sizes[0]), "--ddp-bucket-size")) < 50_000
    assert "--ddp-bucket-size" not in proxy.arguments(None)
    proxy = proxy_of(f"{SUPER} --use-distributed-optimizer --overlap-grad-reduce --ddp-num-buckets 5")
    assert "--ddp-bucket-size" not in proxy.arguments(proxy.sizes[0])


def test_a_schedule_of_the_pipeline_has_the_shape_of_the_launch() -> None:
    """More micro-batches than stages, as many, or fewer; a multiple of PP for the interleaved schedule."""

    def relation(global_batch: int, text: str = SUPER) -> set[int]:
        proxy = proxy_of(text.replace("size 64 ", f"size {global_batch} "), world_size=64)
        on_rank = [
            (proxy.case.sequences // proxy.case.micro_batch_size // s.layout.dp, s.layout)
            for s in proxy.sizes
            if s.layout.pp > 1
        ]
        assert all(count % layout.pp == 0 for count, layout in on_rank if layout.vpp > 1)
        return {(count > layout.pp) - (count < layout.pp) for count, layout in on_rank}

    # DP is 8.
    assert relation(64) == {1}
    assert 0 in relation(32)
    assert -1 in relation(8)
    assert relation(64, SUPER.replace("size 4 --expert-model", "size 2 --expert-model")) == {1}


def test_a_batch_that_the_script_does_not_say() -> None:
    proxy = proxy_of(SUPER.replace("--global-batch-size 64", "--global-batch-size $BATCH"), world_size=64)
    assert proxy.case == proxy_of(SUPER, world_size=64).case


def test_dropout_by_default_is_said() -> None:
    proxy = proxy_of(SUPER.replace("--attention-dropout 0.0 --hidden-dropout 0.0", "--hidden-dropout 0.3"))
    assert option(proxy.arguments(None), "--hidden-dropout") == option(
        proxy.arguments(None), "--attention-dropout"
    )
    remark = next(r for r in proxy.remarks if r.what.startswith("random numbers"))
    assert remark.untested
    assert remark.options == ("--hidden-dropout 0.3", "--attention-dropout 0.1, Megatron's default")
    assert proxy.drawing == ("--hidden-dropout", "0.3", "--attention-dropout", "0.1")
    assert proxy_of(SUPER).drawing == ()


def test_packed_documents_fill_the_row() -> None:
    proxy = proxy_of(f"{SUPER} --sft --context-parallel-size 2")
    assert (
        proxy.case.mask == "random"
        and proxy.case.documents
        and sum(proxy.case.documents) == proxy.case.seq_length
    )
    assert all(length % 4 == 0 for length in proxy.case.documents) and not proxy.case.cut_whole
    isolated = f"{SUPER} --dataloader-inter-document-masking --context-parallel-size 2"
    te, torch = proxy_of(isolated).case, proxy_of(isolated.replace("_te_", "_torch_")).case
    assert te.cut_whole and torch.cut_whole and torch.cut_known and not te.cut_known


def test_experts_that_differ_by_layer() -> None:
    """Puzzle: every E layer of the proxy has a row, and not all are alike."""
    launch = flags_of(Launch.of("puzzle", ParallelLayout(tp=2, dp=4, ep=4), precision="bf16"))
    proxy = make(request(launch), 8)
    rows = proxy.config.moe_layers
    assert rows and len(rows) == proxy.config.pattern.count("E") and len(set(rows)) > 1
    words = proxy.arguments(None)
    assert stored_experts({"spec": words[words.index("--spec") + 1 :][:2]}) == experts_text(proxy.config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"NEMOTRON3_LORA=dim=4,alpha=8 {SUPER.strip()}", "dim=4,alpha=8"),
        (f"NEMOTRON3_LORA=0 {SUPER.strip()}", None),
        (SUPER, None),
    ],
)
def test_adapters(text: str, expected: str | None, tmp_path: Path) -> None:
    launch = command_line.read_launch(text)
    lora, flags = launch.adapters, launch.flags
    assert lora == expected
    bench = Bench(proxy=make(request(flags, lora=lora), 8), flags=tuple(flags), folder=tmp_path)
    assert bench.case(None).lora == expected


def test_heads_alone(tmp_path: Path) -> None:
    """The proxy trains what the launch trains, and the certificate is not one of an ordinary training."""
    text = f'export NEMOTRON3_BOOST="loss=tv,mix=1"\n{SUPER}'
    launch = command_line.read_launch(text)
    heads, flags = launch.heads, tuple(launch.flags)
    assert heads == "loss=tv,mix=1" and command_line.read_launch(SUPER).heads is None
    bench = Bench(proxy=make(request(flags, boost=heads), 8), flags=flags, folder=tmp_path)
    assert bench.case(None).boost == heads
    (finding,) = definition(bench)
    assert finding.state is PropertyState.UNTESTED and "heads alone" in finding.detail
    assert normalised(request(flags, boost=heads)) != normalised(request(flags))


@pytest.mark.parametrize(
    ("heads", "more", "message"),
    [("loss=x", "", "use kl, tv, ce"), ("1", "--context-parallel-size 2", "--context-parallel-size 2")],
)
def test_heads_that_are_none(heads: str, more: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(request(command_line.read_launch(f"{SUPER} {more}").flags, boost=heads), 8)


def test_padded_vocabulary() -> None:
    assert proxy_of(f"{SUPER} --vocab-size 131072").config.vocab_size == 128
    proxy = proxy_of(f"{SUPER} --vocab-size 131000")
    assert (
        proxy.config.vocab_size == 120
        and option(proxy.arguments(None), "--make-vocab-size-divisible-by") == "64"
    )


def test_router_groups() -> None:
    proxy = proxy_of(f"{SUPER} --moe-router-num-groups 8 --moe-router-group-topk 4")
    words = proxy.arguments(None)
    groups, best = (
        int(option(words, "--moe-router-num-groups")),
        int(option(words, "--moe-router-group-topk")),
    )
    experts, topk = proxy.config.num_moe_experts or 0, proxy.config.moe_router_topk or 0
    assert groups > best == 1 and experts % groups == 0 and topk <= experts // groups


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --swiglu", "no --hybrid-layer-pattern"),
        (SUPER.replace("--squared-relu", "--swiglu"), "not a Nemotron-H model"),
        (SUPER.replace("-parallel-size 4", "-parallel-size $PP"), "--set"),
        (f"{SUPER} --norm-epsilon $EPSILON", "norm-epsilon .*--set"),
        (SUPER.replace("-parallel-size 4", "-parallel-size 0"), "1 or more"),
        (f"{SUPER} --use-checkpoint-args --load /none".replace("--hidden-size 4096", ""), "cannot be read"),
    ],
)
def test_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        proxy_of(text)
    assert "\n" not in str(caught.value)


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="60 ranks are no multiple of TP2 x CP1 x PP4"):
        proxy_of(SUPER, world_size=60)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 {}", 32),
        ("python3 -m torch.distributed.run --nproc-per-node=4 -- {}", 4),
        ("GPUS=8\nARGS=(--nproc_per_node $GPUS --nnodes $NODES)\nNODES=2\ntorchrun ${{ARGS[@]}} {}", None),
        ("NODES=2\nARGS=(--nproc_per_node 8 --nnodes $NODES)\ntorchrun ${{ARGS[@]}} {}", 16),
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun python {}", 32),
        ("#SBATCH -N 4 --ntasks-per-node=1\nsrun torchrun --nproc-per-node 8 --nnodes $SLURM_NNODES {}", 32),
        ("srun -n 16 python {}", 16),
        ("NODES=3\nWORLD_SIZE=$((8 * $NODES))\npython {}", 24),
        ("torchrun --nproc-per-node gpu {}", None),
        ("python {}", None),
    ],
)
def test_ranks_of_a_launch(text: str, ranks: int | None) -> None:
    launch = command_line.read_launch(text.format("pretrain_hybrid.py --hidden-size 4"))
    assert launch.world_size == ranks


@settings(max_examples=30, deadline=None)
@given(layout=st.integers(0, 6).flatmap(lambda n: layouts(2**n)), instances=st.sampled_from((1, 1, 2)))
def test_small_layouts_cover_a_large_one(layout: ParallelLayout, instances: int) -> None:
    grid = layout.cp * layout.dp
    large = Sizes(layout=layout, instances=instances if grid % instances == 0 else 1)
    for ranks in (8, 16):
        chosen, missing = cover(large, ranks)
        had = frozenset().union(*(sizes.pairs for sizes in chosen))
        assert large.pairs - had == set(missing)
        for sizes in chosen:
            small = sizes.layout
            assert small.world_size <= ranks and sizes.features <= large.features
            assert small.tp * small.cp * small.dp % small.expert_ranks == 0
            assert all(
                getattr(small, size) <= getattr(layout, size) for size in ("tp", "cp", "dp", "pp", "vpp")
            )
    assert len(cover(large, 16)[1]) <= len(cover(large, 8)[1])


def test_what_is_left_out_says_why() -> None:
    """Eight ranks hold TP, PP and CP at once; three layouts do not have all that meets in a middle stage."""
    large = Sizes(layout=ParallelLayout(tp=8, pp=4, cp=2, dp=8, ep=16, sp=True))
    chosen, missing = cover(large, 8)
    assert any({"TP", "PP", "CP"} <= sizes.features for sizes in chosen)
    assert missing["PP, stages in the middle", "TP"] == "needs more than 3 layouts"
    assert cover(large, 4)[1]["CP", "PP", "TP"] == "needs more than 4 ranks (--ranks)"


@settings(max_examples=10, deadline=None)
@given(layout=st.integers(0, 6).flatmap(lambda n: layouts(2**n)), experts=st.sampled_from((1, 4)))
def test_small_layouts_fit_the_small_model(layout: ParallelLayout, experts: int) -> None:
    stage = ("MEM*EMEME", "MEMEM*EM", "*EMEMEME")
    pattern = "|".join(stage[i % 3] for i in range(layout.stages))
    words = {
        "--num-experts": experts * layout.ep,
        "--moe-router-topk": min(2, experts * layout.ep),
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.etp,
        "--hybrid-layer-pattern": f"{pattern}/*E",
        "--mtp-num-layers": 1,
    }
    flags = [
        f for f in command_line.read_launch(SUPER).flags if f.name not in (*words, "--sequence-parallel")
    ]
    flags += [Flag(name, (str(value),)) for name, value in words.items()]
    proxy = make(request(flags, world_size=layout.world_size), 8)
    config, batch = proxy.config, proxy.case
    assert config.num_moe_experts and config.moe_router_topk
    for small in (sizes.layout for sizes in proxy.sizes):
        assert len(patterns.parse(stages_of(config, small)).stages) == small.stages
        assert config.num_attention_heads % small.tp == config.mamba_num_groups % small.tp == 0
        assert config.num_query_groups % small.tp == 0 or small.tp % config.num_query_groups == 0
        assert config.num_moe_experts % small.ep == 0 and config.moe_router_topk <= config.num_moe_experts
        assert batch.sequences % (batch.micro_batch_size * small.dp) == 0
        assert batch.seq_length % (2 * small.cp * small.tp) == 0
