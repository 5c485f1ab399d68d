"""Run an unmodified Megatron script, on the CPU if there is no GPU.

    torchrun --nproc-per-node 2 -m megatron_nemotron3.run [OPTION ...] SCRIPT ARGS…

The script runs as `__main__` with ARGS as its command line and its own folder first on the path, as
`python SCRIPT ARGS…` would run it. The launcher adds:

- Without a GPU (or with `--device cpu`) CUDA functions use the CPU (`megatron_nemotron3.cpu`).
- With `--spec megatron_nemotron3.specs …` the run stops unless Megatron builds that stack.
- With NEMOTRON3_BOOST only the MTP heads are trained (`megatron_nemotron3.post_training.boost`).
- With `--fp4-format` or `--fp8-format` the run stops if no linear of the model computes in that format. It
  also stops if the precision file is malformed, or if the torch backend would ignore the formats that options
  ask for.
- With `--nemotron3-teacher` the model is distilled from a frozen teacher
  (`megatron_nemotron3.post_training.distill`).
- The folder of `--save` is locked until the last rank ends. Before the start the tracker of `--load` is made
  to name the last complete checkpoint (`megatron_nemotron3.checkpoints.resume`), and a schedule that Megatron
  would refuse to load is refused with the option that it needs.
- `run.json` in the folder of `--save` describes the run; a start with another model is refused, and one
  with another precision, MTP, tokenizer, data set or teacher needs `--change`.
- Processes that the script starts survive a signal to the whole process group and end when it ends; with
  `--exit-signal-handler` Ctrl-C saves and exits, as SIGTERM does (`common/processes.py`).

Exit code 2: the command line is wrong, the version of megatron-core is not supported, another run writes to
--save, the checkpoint to load is damaged or may run code, or Megatron built another model than requested.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

from megatron_nemotron3.checkpoints.trust import OPTION, trust_option, trusting
from megatron_nemotron3.common import processes, spawned
from megatron_nemotron3.common.limits import ChildError
from megatron_nemotron3.common.options import add_option, device_option
from megatron_nemotron3.common.parser import OptionParser, fail, option_values, resolve_device
from megatron_nemotron3.common.switches import BOOST, EMULATE, LOCK, LOG_PRECISION, MONITOR
from megatron_nemotron3.launch import boosting, effects, gpu_start, manifest
from megatron_nemotron3.launch.flag import take_options
from megatron_nemotron3.launch.schedule import require_schedule
from megatron_nemotron3.launch.stored_model import loaded
from megatron_nemotron3.models import stack_specs
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.train import isolation
from megatron_nemotron3.train.isolation import ISOLATE
from megatron_nemotron3.train.monitor import settings
from megatron_nemotron3.train.run_checks import (
    at_first_forward,
    failing,
    require_data,
    require_our_stack,
    require_supported_megatron,
    require_well_formed_file,
    verify_quantized,
)
from megatron_nemotron3.train.teacher import settings as distillation
from megatron_nemotron3.train.teacher.check import chosen as check_distillation
from megatron_nemotron3.train.teacher.check import record_of


def register(commands: Any) -> None:
    """Add `nemotron3 run`; `cli.main` hands every argument after it to `main`."""
    _add_options(
        commands.add_parser("run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "device", device_option())
    parser.add_argument(
        "--monitor",
        type=int,
        metavar="N",
        help=f"interval of the monitors, in iterations; 0: off (default: {MONITOR}, or the log interval)",
    )
    parser.add_argument(
        emulation.OPTION,
        metavar="SETTINGS",
        help=f"value of {EMULATE}, such as nvfp4 or nvfp4,sr=0; 0: off; may also be among ARGS",
    )
    distillation.add_options(parser)
    manifest.add_change(parser)
    add_option(parser, "trust_checkpoint", trust_option(), bool)
    text = "separate the documents of a sequence in all layers; may also be among ARGS"
    parser.add_argument(ISOLATE, action="store_true", help=text)
    parser.add_argument("script", metavar="SCRIPT", help="Megatron training script")
    own = parser.add_argument("arguments", metavar="ARGS…", nargs=argparse.REMAINDER, help="its arguments")
    own.required = False  # argparse would name it next to a missing SCRIPT


class RunArguments(NamedTuple):
    """The command line of this launcher."""

    device: str
    #: Interval of the monitors; None: from the environment.
    monitor: int | None
    script: str
    #: The script's own.
    arguments: list[str]
    #: Value of --nemotron3-emulate; None: from the environment.
    emulate: str | None = None
    changes: tuple[str, ...] = ()
    #: Values of --nemotron3-teacher and --nemotron3-distill.
    teachers: distillation.OptionValues = ((), ())
    trust_checkpoint: bool = False
    #: `arguments` hold Megatron's options for it.
    isolate_documents: bool = False


#: Reads the arguments up to SCRIPT.
Reader = Callable[[list[str]], argparse.Namespace]


def split_arguments(argv: list[str], read: Reader | None = None) -> RunArguments:
    """Take the launcher's own options off a command line; what follows SCRIPT is the script's."""
    count = 0
    while count < len(argv) and argv[count].startswith("-"):
        word = argv[count]
        count += 1 if "=" in word or word in ("-h", "--help", "--", OPTION, ISOLATE) else 2
        if word == "--":
            break
    if read is None:
        parser = OptionParser(prog="megatron_nemotron3.run")
        _add_options(parser)
        read = parser.parse_args
    options = read(argv[: count + 1])
    if options.monitor is not None and options.monitor < 0:
        fail(f"--monitor {options.monitor}: give the interval in iterations, or 0 for off")
    names = (emulation.OPTION, distillation.TEACHER, distillation.HOW)
    arguments, among = take_options(argv[count + 1 :], names)
    emulate = [options.nemotron3_emulate, *among[emulation.OPTION]][-1]
    teachers = (*options.nemotron3_teacher, *among[distillation.TEACHER])
    how = (*options.nemotron3_distill, *among[distillation.HOW])
    if isolate := options.isolate_documents or ISOLATE in arguments:
        arguments = isolation.taken(arguments)
    given = (options.device, options.monitor, options.script, arguments, emulate, tuple(options.change))
    return RunArguments(*given, (teachers, how), options.trust_checkpoint, isolate)


def requested_spec(argv: list[str]) -> tuple[str, Any]:
    """The option `--spec` as text ("" without it), and the stack if it is one of ours, in whatever module."""
    # Megatron-Core 0.19 logs an import error in a spec module and builds its own stack. So it is imported
    # here; where that fails the run ends when a model's first forward begins.
    from megatron_nemotron3 import specs

    module, name = [*(option_values(argv, "--spec") or ()), "", ""][:2]
    words = f"--spec {module} {name}"
    if not module or not name:
        return "", None
    try:
        return words, specs.named(module, name)
    except ValueError as problem:
        fail(f"{words}: {problem}")
    except ImportError as problem:
        message = f"{words}: {problem}, so Megatron built its own stack: put its folder on PYTHONPATH"
        at_first_forward(lambda _: fail(message))
        return words, None


def verify_stack(words: str, spec: Any, arguments: list[str]) -> None:
    """Stop unless Megatron builds the stack of ours that `--spec` names, and the checkpoint is one of it."""
    from megatron_nemotron3.layers.backend import te_problem
    from megatron_nemotron3.layers.registration import argument
    from megatron_nemotron3.specs import TransformerEngineMissing

    if spec.module is TransformerEngineMissing:
        fail(f"{words}: {te_problem()}")
    # `--use-checkpoint-args` replaces `--spec` by the checkpoint's.
    require_our_stack(f"{words} was given", " (does --use-checkpoint-args override --spec?)")
    with failing(ValueError, OSError, ChildError):
        found = None if "--use-checkpoint-args" in arguments else loaded(arguments)
    if found is None:
        return
    before, which = stack_specs.stored_experts(found[1].args), found[0]

    def compare(now: str) -> None:
        if before not in (None, now):
            fail(
                f"{words} builds {_experts(now)}, and {which} of --load was trained with {_experts(before)}: "
                "weights of the same shapes would load and compute something else; give its --spec"
            )

    if option_values(arguments, "--hybrid-layer-pattern"):
        compare(stack_specs.experts_text(spec.submodules.model))
    else:  # the script may have a list of layer configs, which the stack reads
        at_first_forward(lambda _: compare(argument(stack_specs.ARGUMENT) or ""))


def _experts(text: str | None) -> str:
    return f"layers of experts (width:top-k) {text}" if text else "the same experts in every layer"


def torch_spec(spec: Any) -> str:
    """The --spec of the torch backend for the same model."""
    model = None if spec is None else spec.submodules.model
    return f"--spec {stack_specs.MODULE} {stack_specs.spec_name(model, 'torch')}"


def verify_options(arguments: list[str], spec: Any, announce: Callable[[str], None]) -> None:
    """Stop at options with which our stack would compute something else than asked; name other surprises."""
    from megatron_nemotron3.specs import is_torch

    for severity, sentence in effects.said_of(arguments, "torch" if is_torch(spec) else "te"):
        if severity == "error":
            fail(sentence)
        if LOCK not in os.environ:  # `nemotron3 train` has said it
            announce(f"{severity}: {sentence}")


def verify_formats(arguments: list[str], words: str, spec: Any, *, emulate: bool, measured: bool) -> None:
    """Stop unless linears will compute in the formats that options request, and can be measured."""
    from megatron_nemotron3.precision.census import require_usable
    from megatron_nemotron3.precision.model_formats import CensusError
    from megatron_nemotron3.specs import is_torch

    with_torch = is_torch(spec)
    if measured and not with_torch:
        fail(
            f"{LOG_PRECISION} measures linears of the torch backend, and --spec names another one: "
            f"use {torch_spec(spec)}, or unset it"
        )
    with failing(CensusError):
        require_usable(arguments, torch_spec=with_torch, emulate=emulate, measured=measured)
    if emulate and spec is not None and not with_torch:
        fail(
            f"{EMULATE} or {emulation.OPTION} emulates linears of the torch backend, and --spec "
            f"names {words.split()[-1]}: use {torch_spec(spec)}, or turn emulation off"
        )
    if emulate:
        require_our_stack(
            f"{EMULATE} or {emulation.OPTION} is set", f", which ignores it: use {torch_spec(None)}"
        )
    verify_quantized(arguments)


def verify_rows(arguments: list[str], words: str, spec: Any, isolate: bool) -> None:
    """Stop unless the layers keep documents apart in the way in which the script cuts rows over CP ranks."""
    from megatron_nemotron3.specs import is_torch

    if isolate and spec is None:
        fail(f"{ISOLATE}: {words or 'no --spec'} is no stack of this package: use {torch_spec(None)}")
    if isolation.cuts_whole_rows(arguments) and spec is not None and not is_torch(spec):
        fail(
            "--dataloader-inter-document-masking with context parallelism: Megatron cuts the whole row, and "
            f"Transformer Engine's layers take one that is cut document by document: use {torch_spec(spec)}"
        )


def prepare_folders(arguments: list[str], *given: Any) -> ExitStack:
    """Prepare folders as `script_folders.prepared`, or stop; return what holds the lock of `--save`."""
    from megatron_nemotron3.launch.script_folders import prepared

    with ExitStack() as stack:
        with failing(ValueError, OSError, ChildError):
            stack.enter_context(prepared(arguments, int(os.environ["RANK"]), *given))
        return stack.pop_all()


def main(argv: list[str] | None = None, read: Reader | None = None) -> None:
    """Entry point; `argv` without the program name, `read` as for `split_arguments`."""
    with processes.as_rank():
        given = split_arguments(sys.argv[1:] if argv is None else argv, read)
        with trusting(given.trust_checkpoint):
            _launch(given)


def _launch(given: RunArguments) -> None:
    device, monitor, script, arguments, emulate, changes, teachers, _, isolate = given
    if not os.path.isfile(script):
        own = os.path.join(os.path.dirname(__file__), "train", "pretrain_script.py")
        fail(f"script {script} does not exist: give that of a Megatron-LM checkout, or {own}")
    if emulate == "":
        fail(f"{emulation.OPTION}: give a value of {EMULATE}: nvfp4 or nvfp4,sr=0, or 0 for off")
    with failing(ValueError, OSError, ChildError):
        emulated = (
            emulation.emulation_in_environment() if emulate is None else emulation.parse_emulation(emulate)
        )
        measured = emulation.logging_in_environment()
        distilled = check_distillation(teachers, arguments, int(os.environ.get("WORLD_SIZE", 1)))
        teacher = record_of(distilled)
        boost = boosting.requested(arguments, distilled=bool(distilled))
        if isolate:
            isolation.require_possible(arguments, distilled=bool(distilled))
        require_schedule(script, arguments)
    require_well_formed_file(arguments)
    require_data(arguments, script)
    device = resolve_device(device)
    from megatron_nemotron3.common.ranks import single_process_environment

    single_process_environment()

    def announce(message: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron_nemotron3: {message}", flush=True)

    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with failing(ValueError, OSError, ChildError):
        gpu_start.require_attention_variables(arguments, os.environ)
        if device != "cpu":
            for note in gpu_start.require_gpu_packages(arguments, os.environ, int(os.environ["RANK"])):
                announce(f"note: {note}")
    locks = prepare_folders(arguments, changes, emulated, teacher)

    from megatron_nemotron3.cpu import cpu_mode, quiet_on_cpu

    if device == "cpu":
        quiet_on_cpu()
    require_supported_megatron()
    with locks, ExitStack() as stack:
        with processes.no_garbage_collection():
            stack.enter_context(cpu_mode(announce) if device == "cpu" else nullcontext())
            # The environment is read once, for the whole run.
            stack.enter_context(emulation.emulating(emulated))
            stack.enter_context(emulation.logging_precision(measured))
            if distilled:
                from megatron_nemotron3.post_training.distill.attach import distilling

                stack.enter_context(distilling(*distilled))
            if monitor is not None:
                stack.enter_context(settings.monitoring(monitor))
            spec_words, spec = requested_spec(arguments)
            verify_rows(arguments, spec_words, spec, isolate)
            if spec is not None:
                from megatron_nemotron3.layers import frozen

                verify_options(arguments, spec, announce)
                verify_stack(spec_words, spec, arguments)
                frozen.name_moving_biases(announce)
            if boost is not None:
                from megatron_nemotron3.post_training.boost.heads import training_heads

                if spec is None:
                    fail(f"{BOOST} trains a stack of this package: use {torch_spec(None)}")
                stack.enter_context(training_heads(boost))
            verify_formats(
                arguments, spec_words, spec, emulate=emulated is not None, measured=measured is not None
            )
        from megatron_nemotron3.precision.model_formats import CensusError
        from megatron_nemotron3.precision.yaml_file import PrecisionFileError
        from megatron_nemotron3.train.monitor.not_finite import naming_not_finite

        try:
            with failing(CensusError, PrecisionFileError), naming_not_finite():
                spawned.run_script(script)
        finally:
            import torch

            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
