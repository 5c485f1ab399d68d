"""`nemotron3 doctor`: checks versions, imports, GPU and one step."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.cli import packages
from megatron_nemotron3.cli.packages import DoctorFinding, Level
from megatron_nemotron3.common.options import add_command, json_flag, option
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.cpu import cpu_mode, quiet_on_cpu
from megatron_nemotron3.models import Nemotron3Config, tiny
from megatron_nemotron3.models.command import model as named_model
from megatron_nemotron3.precision import settings
from megatron_nemotron3.precision.formats import EMULATED, FORMATS, Capability, runnable

if TYPE_CHECKING:
    import torch

MARKS: dict[Level, str] = {"ok": "ok", "absent": "-", "warning": "warning", "error": "ERROR"}
#: Asks torch about CUDA in a process of its own, because CUDA stays initialized for the life of a process.
_QUERY = """
import json, torch
found = {"built": torch.version.cuda, "architectures": []}
if torch.version.cuda:
    found["architectures"] = torch.cuda.get_arch_list()
    if torch.distributed.is_nccl_available():
        found["nccl"] = torch.cuda.nccl.version()
found["available"] = torch.cuda.is_available()
if found["available"]:
    found["devices"] = [
        {
            "name": p.name,
            "capability": [p.major, p.minor],
            "gib": round(p.total_memory / 2**30, 1),
        }
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    try:
        a = torch.ones(64, 64, device="cuda")
        (a @ a).sum().item()
    except Exception as problem:
        found["problem"] = str(problem).splitlines()[0]
elif torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as problem:
        found["problem"] = str(problem).splitlines()[0].split(". ")[0]
print(json.dumps(found))
"""
#: Seconds for torch to answer.
TIMEOUT = 180
#: Precision -> (test of the compute capability, text).
PRECISIONS: dict[str, tuple[Callable[[Capability], bool], str]] = {
    "bf16": (lambda c: c >= (8, 0), "8.0"),
    **{fmt.name: (fmt.runs_on, fmt.needs) for fmt in FORMATS.values()},
}
#: Tokens per sequence of the step.
LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `nemotron3 doctor`."""

    step: str | None = option(
        "also train one step of a model's smaller variant: a NAME or FILE", "NAME", nargs="?", const="super"
    )
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 doctor`."""
    add_command(commands.add_parser("doctor"), DoctorOptions, doctor_command)


def doctor_command(options: DoctorOptions) -> int:
    """Check this environment. Exit status 1 if there is an error, else 0."""
    if options.step is not None:
        named_model(options.step)  # reports a wrong name before the checks start
    have = packages.installed()
    sections: list[tuple[str, Sequence[DoctorFinding]]] = [("packages", packages.check(have))]
    if imported := ", ".join(name for name in packages.PURPOSE if name in have):
        _say(f"importing {imported}, which takes up to a minute")
    imports = packages.load_all()
    sections.append(("imports", imports))
    if "torch" in have:
        _say("asking torch for GPUs")
        sections.append(("gpu", gpu_findings()))
    else:
        sections.append(("gpu", [DoctorFinding("gpu", "absent", "not looked for: torch is not installed")]))
    sections.append(("precision", emulation()))
    if options.step is not None:
        _say("running the check of step")
        usable = {finding.subject for finding in imports if finding.level == "ok"}
        skipped = [DoctorFinding("step", "error", "skipped: torch or megatron-core cannot be imported")]
        needed = usable.issuperset(packages.NEEDED)
        sections.append(("step", step_findings(options.step) if needed else skipped))
    verdict = _verdict(sections)
    sections.append(("verdict", [verdict]))
    if options.json:
        print_json({title: [asdict(finding) for finding in findings] for title, findings in sections})
    else:
        print(render(sections))
    return int(verdict.level == "error")


def emulation() -> list[DoctorFinding]:
    """The finding about NEMOTRON3_EMULATE; none where it is not set."""
    try:
        emulated = settings.emulation_in_environment()
    except ValueError as problem:
        return [DoctorFinding(EMULATE, "error", str(problem), f"unset {EMULATE}")]
    if emulated is None:
        return []
    return [DoctorFinding(EMULATE, "ok", f"the torch backend emulates {emulated.text()}")]


def _say(what: str) -> None:
    """Report on stderr what takes time; stdout holds the findings alone."""
    print(f"nemotron3 doctor: {what} …", file=sys.stderr, flush=True)


def _verdict(sections: Sequence[tuple[str, Sequence[DoctorFinding]]]) -> DoctorFinding:
    """Return whether this environment can train, and the next command."""
    errors = [finding for _, findings in sections for finding in findings if finding.level == "error"]
    if not errors:
        return DoctorFinding("verdict", "ok", "this environment can train", "nemotron3 train nano --tiny")
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in errors))
    cure = next((finding.cure for finding in errors if finding.cure), "")
    return DoctorFinding("verdict", "error", f"this environment cannot train: {subjects}", cure)


def render(sections: Sequence[tuple[str, Sequence[DoctorFinding]]]) -> str:
    """Text for a terminal, section by section; each cure is below its finding."""
    lines: list[str] = []
    for title, findings in sections:
        width = max((len(finding.subject) for finding in findings), default=0)
        lines += ["", title] if lines else [title]
        for f in findings:
            lines.append(f"  {MARKS[f.level]:<7} {f.subject:<{width}}  {f.message}".rstrip())
            lines += [f"  {'':<7} {'':<{width}}  -> {f.cure}"] if f.cure else []
    return "\n".join(lines)


def judge(found: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Findings from the answer of `_QUERY`."""
    if not found["built"]:
        yield DoctorFinding("gpu", "warning", "torch was built without CUDA: CPU runs only")
        return
    if not found["available"]:
        why = found.get("problem", "no device")
        yield DoctorFinding(
            "gpu", "absent", f"torch for CUDA {found['built']} finds no usable GPU ({why}): CPU runs only"
        )
        return
    for device in found["devices"]:
        capability = tuple(device["capability"])
        name = f"{device['name']}, {device['gib']} GiB, compute capability {capability[0]}.{capability[1]}"
        if not _has_kernels_for(capability, found["architectures"]):
            yield DoctorFinding(
                "gpu",
                "error",
                f"{name}: torch has kernels for {', '.join(found['architectures'])} only",
                f"install a torch with sm_{capability[0]}{capability[1]} (this one: CUDA {found['built']})",
            )
        elif problem := found.get("problem"):
            yield DoctorFinding("gpu", "error", f"{name}: {problem}")
        else:
            yield DoctorFinding("gpu", "ok", name)
    if found.get("nccl", [])[:3] == [2, 30, 5]:  # NVIDIA-NeMo/Megatron-Bridge #5462
        yield DoctorFinding(
            "nccl",
            "warning",
            "2.30.5: over the network plugin SPCX it corrupts BF16 in all-to-alls of experts between nodes",
            "NCCL_NET_PLUGIN=none, or --moe-token-dispatcher-type flex with hybridep",
        )
    major, minor = found["devices"][0]["capability"]
    first = (major, minor)
    for precision, (fits, needs) in PRECISIONS.items():
        if fits(first):
            yield DoctorFinding(precision, "ok", "trains on this GPU")
        else:
            cure = f"this GPU trains in {', '.join(runnable(first))}"
            if precision in EMULATED:
                cure += "; --emulate computes it on any device, slowly"
            yield DoctorFinding(precision, "absent", f"needs compute capability {needs}", cure)


def _has_kernels_for(capability: tuple[int, ...], architectures: list[str]) -> bool:
    """Whether a build has a binary (sm) for the same major version, or PTX, not newer than the GPU."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = "".join(c for c in digits if c.isdigit())
        major, minor = int(number[:-1]), int(number[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:
            return True
    return False


def gpu_findings() -> list[DoctorFinding]:
    """Ask torch about CUDA on this machine."""
    command = [sys.executable, "-W", "ignore", "-c", _QUERY]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return [DoctorFinding("gpu", "error", f"torch did not answer in {TIMEOUT} s")]
    if done.returncode:
        return [DoctorFinding("gpu", "error", (done.stderr.strip().splitlines() or ["no answer"])[-1])]
    return list(judge(json.loads(done.stdout.splitlines()[-1])))


def without_gradient(model: torch.nn.Module) -> dict[str, str]:
    """Parameter name -> "none" or "zero", for each trainable parameter without a nonzero gradient."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
        if gradient is None:
            found[name] = "none"
        elif not gradient.any():
            found[name] = "zero"
    return found


def step_findings(name: str) -> list[DoctorFinding]:
    """Train the tiny form of a model for one step, on the GPU if there is one, else on the CPU."""
    quiet_on_cpu()
    with redirect_stdout(io.StringIO()):  # drops Megatron's messages
        import torch

        config = tiny(named_model(name))
        if torch.cuda.is_available():
            return _train_one_step(config, "cuda", "bf16")
        with cpu_mode():
            return _train_one_step(config, "cpu", "fp32")


def _train_one_step(config: Nemotron3Config, device: str, precision: str) -> list[DoctorFinding]:
    import torch

    from megatron_nemotron3.launch import Launch
    from megatron_nemotron3.train.build import build

    model = build(Launch.of(config, precision=precision))
    model.to(device)
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), device=device)
    positions = torch.arange(LENGTH, device=device).expand_as(ids)
    loss = model(ids, positions, None, labels=ids).float().mean()
    loss.backward()
    parameters = sum(1 for p in model.parameters() if p.requires_grad)
    missing = without_gradient(model)
    # With few tokens some experts get none, which is not an error.
    unchosen = {n for n, what in missing.items() if ".experts.linear_fc" in n and what == "zero"}
    found = [
        DoctorFinding(
            "step",
            "ok" if torch.isfinite(loss) else "error",
            f"{config.name} on {device} in {precision}: loss {loss.item():.3f}, {parameters} parameters",
        )
    ]
    found += [
        DoctorFinding(
            n,
            "error",
            f"gradient is {what}",
            "look for a detach, or a recomputation under no_grad, in the layers after it",
        )
        for n, what in missing.items()
        if n not in unchosen
    ]
    if unchosen:
        found.append(
            DoctorFinding("experts", "ok", f"{len(unchosen)} weights of experts that no token chose")
        )
    return found
