"""What a recipe does with its GPUs and nodes: options, NUMA, order by NVLink domain, saves, kernels."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.cases import BASIC, RECIPES, run
from tests.recipes.test_launch import _program

BIND = RECIPES / "bind.sh"
PROXY = RECIPES / "super" / "proxy.sh"

# -- options of a GPU ----------------------------------------------------------------------------------------


def test_the_options_and_variables_of_a_gpu() -> None:
    """The golden file super-proxy-gb200 has all; a variable that is set stays, WITHOUT drops options."""
    given = {"DRY_RUN": "1", **BASIC, "NNODES": "8", "GPU": "gb200"}
    left = run(PROXY, {**given, "USE_MNNVL": "7", "WITHOUT": "cuda-graph-impl cuda-graph-modules"})
    assert left.returncode == 0, left.stderr
    assert " USE_MNNVL=7 " in left.stdout and " CUDA_DEVICE_MAX_CONNECTIONS=32 " in left.stdout
    assert "cuda-graph" not in left.stdout and "--moe-flex-dispatcher-backend hybridep" in left.stdout
    # Megatron sets it by --attention-backend, and refuses another value.
    assert "NVTE_FUSED_ATTN" not in left.stdout + run(PROXY, {**given, "GPU": ""}).stdout
    # Megatron asks for 1 on Hopper with TP or CP.
    hopper = run(PROXY, {**given, "GPU": "h100", "TP": "2"})
    assert " CUDA_DEVICE_MAX_CONNECTIONS=1 " in hopper.stdout, hopper.stderr
    refused = run(PROXY, {**given, "GPU": "h101"})
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.count("\n") == 1 and "invalid choice: 'h101'" in refused.stderr


# -- NUMA ----------------------------------------------------------------------------------------------------

#: Four GPUs of a GB200 node, whose PCI domains have more than four digits in nvidia-smi.
SMI = """\
0, GPU-aaaa0000, 00000008:01:00.0
1, GPU-bbbb0000, 00000009:01:00.0
2, GPU-cccc0000, 00000018:0A:00.0
3, GPU-dddd0000, 00010019:01:00.0
"""
#: The folders that the kernel has for them.
PLACES = ("0008:01:00.0", "0009:01:00.0", "0018:0a:00.0", "10019:01:00.0")


def _machine(folder: Path, nodes: Sequence[str], cpus: dict[int, str], smi: str = SMI) -> None:
    """A sysfs with these NUMA nodes of the GPUs ("": no such file), and an nvidia-smi."""
    for place, node in zip(PLACES, nodes, strict=True):
        (folder / "sys/bus/pci/devices" / place).mkdir(parents=True)
        if node:
            (folder / "sys/bus/pci/devices" / place / "numa_node").write_text(node + "\n")
    for node_number, listed in cpus.items():
        (folder / f"sys/devices/system/node/node{node_number}").mkdir(parents=True)
        (folder / f"sys/devices/system/node/node{node_number}/cpulist").write_text(listed + "\n")
    if smi:
        _program(folder / "bin", "nvidia-smi", f"cat <<'E'\n{smi}E\n")
    else:
        _program(folder / "bin", "nvidia-smi", "exit 9")


def _bound(folder: Path, rank: int, **variables: str) -> tuple[str, str]:
    """What a rank says: the command that it becomes, and what it says besides."""
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SYSFS": str(folder / "sys"),
        "LOCAL_RANK": str(rank),
        **variables,
    }
    words = ["bash", str(BIND), "echo", "runs", "a b"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def _tools(folder: Path, *names: str) -> None:
    """Stand-ins of numactl and taskset that print their options; a name with "-" cannot bind."""
    for name in ("numactl", "taskset"):
        body = 'n=1; while [ "${!n}" != echo ] && [ "${!n}" != true ]; do n=$((n+1)); done\n'
        body += f'[ "${{!n}}" = true ] || echo "{name} ${{*:1:n-1}}"\nexec "${{@:n}}"\n'
        _program(folder / "bin", name, body if name in names else "echo forbidden >&2; exit 1\n")


def test_each_rank_runs_on_the_node_of_its_gpu(tmp_path: Path) -> None:
    _machine(tmp_path, ["0", "0", "1", "1"], {0: "0-71", 1: "72-143"})
    _tools(tmp_path, "numactl", "taskset")
    for rank, node in enumerate("0011"):
        assert _bound(tmp_path, rank) == (f"numactl --cpunodebind={node} --preferred={node}\nruns a b", "")
    # The order of CUDA_VISIBLE_DEVICES is the order of local ranks; a UUID may be shortened.
    assert "cpunodebind=1" in _bound(tmp_path, 0, CUDA_VISIBLE_DEVICES="3,2,1,0")[0]
    assert "cpunodebind=1" in _bound(tmp_path, 1, CUDA_VISIBLE_DEVICES="GPU-aaaa0000,GPU-cccc")[0]


def test_without_numactl_the_cpus_are_bound(tmp_path: Path) -> None:
    """Or where a container forbids the memory policy."""
    _machine(tmp_path, ["0", "0", "1", "1"], {0: "0-71", 1: "72-143"})
    _tools(tmp_path, "taskset")
    assert _bound(tmp_path, 2) == ("taskset -c 72-143\nruns a b", "")


@pytest.mark.parametrize(
    ("nodes", "cpus", "smi", "tools", "variables", "reason"),
    [
        (["-1"] * 4, {0: "0-7"}, SMI, ["numactl"], {}, "numa_node says -1"),
        ([""] * 4, {0: "0-7"}, SMI, ["numactl"], {}, "0008:01:00.0/numa_node does not exist"),
        # The memory of a Grace Hopper GPU is a NUMA node, too.
        (["4"] * 4, {0: "0-71", 4: ""}, SMI, ["numactl"], {}, "NUMA node 4 of GPU 0 has no CPU"),
        (["0"] * 4, {0: "0-7"}, "", ["numactl"], {}, "nvidia-smi lists no GPU"),
        (["0"] * 4, {0: "0-7"}, SMI, [], {}, "neither numactl nor taskset can use node 0 here"),
        (["0"] * 4, {0: "0-7"}, SMI, ["numactl"], {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "list GPU MIG-1"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_one_line(
    tmp_path: Path, nodes: list[str], cpus: dict[int, str], smi: str, tools: list[str],
    variables: dict[str, str], reason: str,
) -> None:  # fmt: skip
    """The rank runs; the first of a host says why it is not bound, the others nothing."""
    _machine(tmp_path, nodes, cpus, smi)
    _tools(tmp_path, *tools)
    output, said = _bound(tmp_path, 0, **variables)
    assert output == "runs a b"
    assert said.startswith("bind.sh: ") and reason in said and said.count("\n") == 1
    if tools:
        variables = {name: f"{value},{value}" for name, value in variables.items()}
        assert _bound(tmp_path, 1, **variables) == ("runs a b", "")


def test_a_rank_that_alone_is_unknown_speaks(tmp_path: Path) -> None:
    _machine(tmp_path, ["0", "0", "1", "-1"], {0: "0-71", 1: "72-143"})
    _tools(tmp_path, "numactl")
    output, said = _bound(tmp_path, 3)
    assert output == "runs a b" and "rank 3 is not bound" in said


def test_the_real_taskset_binds(tmp_path: Path) -> None:
    """With the CPUs of this machine, without stand-ins."""
    if shutil.which("taskset") is None:
        pytest.skip("taskset is not installed")
    cpu = min(os.sched_getaffinity(0))
    _machine(tmp_path, ["0", "0", "1", "1"], {0: str(cpu), 1: "4000"})
    _program(tmp_path / "bin", "numactl", "exit 1")
    words = ["bash", str(BIND), sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SYSFS": str(tmp_path / "sys")}
    done = [
        subprocess.run(words, env={**environment, "LOCAL_RANK": rank}, capture_output=True, text=True)
        for rank in ("0", "2")
    ]
    assert done[0].stdout.strip() == f"{{{cpu}}}" and done[0].stderr == ""
    # CPUs that the job does not have.
    assert done[1].returncode == 0 and "can use node 1 here" in done[1].stderr


def test_numa_is_one_variable() -> None:
    """Golden files have the default."""
    done = run(PROXY, {"DRY_RUN": "1", **BASIC, "NUMA": "0"})
    assert done.returncode == 0 and "bind.sh" not in done.stdout, done.stderr


# -- order of nodes ------------------------------------------------------------------------------------------


def _places(nodes: str, ep: int, **variables: str) -> tuple[list[int], set[str], str]:
    """New number of every node, the names of node 0, and what node 0 says besides its report."""
    ranks, masters, said = [], set(), ""
    for rank in range(len(nodes.split())):
        given = {
            "DRY_RUN": "1", **BASIC, "NNODES": str(len(nodes.split())), "GPUS": "4", "NODE_RANK": str(rank),
            "TP": "2", "EP": str(ep), "MASTER_ADDR": "first", "NVLINK_NODES": nodes, **variables,
        }  # fmt: skip
        done = run(PROXY, given)
        assert done.returncode == 0, done.stderr
        found = re.search(r"--node-rank (\d+) --master-addr (\S+)", done.stdout)
        assert found is not None
        ranks.append(int(found[1]))
        masters.add(found[2])
        said += "".join(f"{x}\n" for x in done.stderr.splitlines() if x and not x.startswith("#"))
    return ranks, masters, said


def test_whole_groups_come_before_what_is_left_of_a_domain() -> None:
    """Two nodes a group: one of rack 1 (three nodes) is left, and goes with the one of rack 2."""
    ranks, masters, said = _places("a=2 b=1 c=1 d=1", 8)
    assert ranks == [2, 0, 1, 3] and masters == {"b"}
    assert said == (f"{PROXY}: 1 of 2 expert groups cross an NVLink domain: submit with sbatch --segment 2\n")


def test_nothing_is_said_where_no_order_helps() -> None:
    """A node of H100s is a domain of its own, and EP 32 is published for it."""
    assert _places("a=1 b=2", 8) == ([0, 1], {"a"}, "")
    larger = _places("a=1 b=1 c=2 d=2", 16)
    assert larger[0] == [0, 1, 2, 3]
    assert "EP*ETP=16 GPUs are 4 nodes, and the largest NVLink domain here has 2: lower EP" in larger[2]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize(("tp", "pp", "ep", "etp", "dp"), [(2, 2, 8, 1, 8), (4, 2, 4, 2, 4), (1, 3, 4, 1, 4)])
def test_megatron_puts_an_expert_group_on_ranks_in_a_row(
    order: str, tp: int, pp: int, ep: int, etp: int, dp: int
) -> None:
    """What the order of nodes rests on, with and without --use-tp-pp-dp-mapping."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    expert_dp = tp * dp // (ep * etp)
    made = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order, rank_offset=0
    ).get_ranks("tp-ep")
    size = ep * etp
    assert sorted(map(sorted, made)) == [list(range(i, i + size)) for i in range(0, tp * dp * pp, size)]


def _fabric(uuid: str) -> str:
    return "\n".join(
        f"    Fabric\n        State    : Completed\n        CliqueId    : 3\n        ClusterUUID    : {uuid}"
        for _ in range(2)
    )


@pytest.mark.full
def test_slurm_asks_the_nodes_for_their_domain(tmp_path: Path) -> None:
    """Four nodes of two racks, in turn, as Slurm numbers them; each node's recipe sees the same list."""
    _program(tmp_path / "bin", "scontrol", "printf 'r1-1\\nr2-1\\nr1-2\\nr2-2\\n'")
    uuids = ("6a0e0f3c-1", "77777777-2", "6a0e0f3c-1", "77777777-2")
    for node, uuid in enumerate(uuids):
        (tmp_path / f"smi{node}").write_text(_fabric(uuid))
    _program(tmp_path / "bin", "nvidia-smi", f'cat "{tmp_path}/smi$SLURM_NODEID"')
    step = (
        'label=; [ "$1" != --label ] || label=1\nwhile [ "$1" != bash ]; do shift; done\n'
        "for n in 0 1 2 3; do\n"
        'SLURM_NODEID=$n "$@" | if [ $label ]; then sed "s/^/$n: /"; else cat; fi\ndone\n'
    )
    _program(tmp_path / "bin", "srun", step)
    variables = {
        "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "1",
        "DRY_RUN": "1", "TP": "2", "EP": "8", **BASIC,
    }  # fmt: skip
    job = tmp_path / "job"
    job.write_text(f'exec bash {RECIPES}/slurm.sh "{RECIPES}/super/proxy.sh"')

    def launched(**more: str) -> tuple[list[str], str]:
        done = run(job, {**variables, **more}, str(tmp_path / "bin"))
        assert done.returncode == 0, done.stderr
        return re.findall(r"--node-rank (\d) --master-addr (\S+)", done.stdout), done.stderr

    assert launched()[0] == [(n, "r1-1") for n in "0213"]
    assert launched(NVLINK_ORDER="0")[0] == [(n, "r1-1") for n in "0123"]
    # Fabrics that end at the node: no domain is shared, nothing is said.
    for node in range(4):
        (tmp_path / f"smi{node}").write_text(
            _fabric(("N/A", "00000000-0000-0000-0000-000000000000")[node % 2])
        )
    order, said = launched()
    assert order == [(n, "r1-1") for n in "0123"] and "NVLink" not in said
    _program(tmp_path / "bin", "nvidia-smi", "exit 9")
    order, said = launched()
    assert order == [(n, "r1-1") for n in "0123"]
    assert said.count("nvidia-smi names no NVLink domain here, so the nodes keep Slurm's order") == 1


# -- saves ---------------------------------------------------------------------------------------------------


def test_asynchronous_saves_are_one_variable() -> None:
    """What Megatron makes of the words is in test_commands.py."""
    given = {"DRY_RUN": "1", **BASIC}
    assert "--async-strategy nvrx" in run(PROXY, {**given, "ASYNC_SAVE": "nvrx"}).stdout
    assert "async" not in run(PROXY, {**given, "ASYNC_SAVE": "0"}).stdout
    refused = run(PROXY, {**given, "ASYNC_SAVE": "yes"})
    assert refused.returncode == 2 and "ASYNC_SAVE=yes: use mcore, nvrx or 0" in refused.stderr


# -- compiled kernels ----------------------------------------------------------------------------------------

#: Launching compiles a kernel each for Triton and inductor, and leaves what is not finished.
COMPILING = f"""
case "$*" in
*torch.distributed.run*)
    echo "found: $(cd "$TRITON_CACHE_DIR" 2> /dev/null && ls)"
    mkdir -p "$TRITON_CACHE_DIR/$KERNEL" "$TRITON_CACHE_DIR/tmp.pid_1"
    echo "$KERNEL" > "$TRITON_CACHE_DIR/$KERNEL/x.cubin"; echo half > "$TRITON_CACHE_DIR/tmp.pid_1/y.cubin"
    [ -z "${{TRITON_ONLY:-}}" ] || exit 0
    mkdir -p "$TORCHINDUCTOR_CACHE_DIR/ab"
    echo code > "$TORCHINDUCTOR_CACHE_DIR/ab/c.py"; echo half > "$TORCHINDUCTOR_CACHE_DIR/ab/.1.2.tmp" ;;
*) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


def _compile(folder: Path, node: str, kernel: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A launch on a node that has a copy of its own."""
    _program(folder / "bin", "python3", COMPILING)
    given: dict[str, Any] = {
        **BASIC, "LOAD": "", "OUTPUT": str(folder / "output"), "KERNEL_CACHE_LOCAL": str(folder / node),
        "KERNEL": kernel, "NO_DOCTOR": "1", "EP": "8", **variables,
    }  # fmt: skip
    done = run(PROXY, {name: value for name, value in given.items() if value}, str(folder / "bin"))
    assert done.returncode == 0, done.stderr
    return done


def _archived(archive: Path) -> list[str]:
    """Files in an archive that a process in the background writes."""
    for _ in range(200):
        if archive.exists():
            break
        time.sleep(0.1)
    listed = subprocess.run(["tar", "-tf", str(archive)], capture_output=True, text=True, check=True)
    return sorted(line for line in listed.stdout.splitlines() if not line.endswith("/"))


@pytest.mark.full
def test_a_node_finds_what_another_compiled(tmp_path: Path) -> None:
    """The archive has what is complete and nothing else; a copy that a node already has is not touched."""
    assert _compile(tmp_path, "one", "k1").stdout.endswith("found: \n")
    shared = tmp_path / "output/kernels"
    assert _archived(shared / "kernels-0.tar") == ["inductor/ab/c.py", "triton/k1/x.cubin"]
    (tmp_path / "two/triton/k1").mkdir(parents=True)
    (tmp_path / "two/triton/k1/x.cubin").write_text("its own")
    (shared / "kernels-7.tar").write_text("damaged")
    second = _compile(tmp_path, "two", "k2", NNODES="2", NODE_RANK="1", MASTER_ADDR="a")
    assert "found: k1" in second.stdout
    assert second.stderr.count("kernels-7.tar cannot be read and is not used") == 1
    assert (tmp_path / "two/triton/k1/x.cubin").read_text() == "its own"
    assert (tmp_path / "two/inductor/ab/c.py").read_text() == "code\n"
    assert not list((tmp_path / "two").glob(".fresh*"))
    # One node of a pipeline stage writes, so 64 nodes write no more than the stages.
    time.sleep(2.5)
    assert sorted(p.name for p in shared.iterdir()) == ["kernels-0.tar", "kernels-7.tar"]


@pytest.mark.full
def test_a_launch_without_inductor_shares_what_it_has(tmp_path: Path) -> None:
    _compile(tmp_path, "one", "k1", TRITON_ONLY="1")
    assert _archived(tmp_path / "output/kernels/kernels-0.tar") == ["triton/k1/x.cubin"]


@pytest.mark.full
def test_every_pipeline_stage_shares_its_kernels(tmp_path: Path) -> None:
    """The last stage has layers that the first has not."""
    _compile(tmp_path, "two", "k2", NNODES="2", NODE_RANK="1", MASTER_ADDR="a", PP="2", EP="4")
    assert _archived(tmp_path / "output/kernels/kernels-1.tar") == ["inductor/ab/c.py", "triton/k2/x.cubin"]


def test_kernel_caches_are_one_variable(tmp_path: Path) -> None:
    """Off, with a cache that the user chose, and where the local folder is not the user's."""
    given = {"DRY_RUN": "1", **BASIC}
    assert "CACHE_DIR" not in run(PROXY, {**given, "KERNEL_CACHE": "0"}).stdout
    assert "/nemotron3-kernels-" not in run(PROXY, {**given, "TRITON_CACHE_DIR": "/mine"}).stdout
    (tmp_path / "file").touch()
    real = shlex.quote(sys.executable)
    launched = f'case "$*" in *torch.distributed.run*) echo runs ;; *) exec {real} "$@" ;; esac\n'
    _program(tmp_path / "bin", "python3", launched)
    variables = {
        **BASIC,
        "OUTPUT": str(tmp_path / "output"),
        "KERNEL_CACHE_LOCAL": str(tmp_path / "file/below"),
    }
    variables |= {"NO_DOCTOR": "1", "LOAD": ""}
    done = run(PROXY, {name: value for name, value in variables.items() if value}, str(tmp_path / "bin"))
    assert done.stdout.endswith("runs\n") and "CACHE_DIR" not in done.stdout
    assert "file/below cannot be written or belongs to another user" in done.stderr
