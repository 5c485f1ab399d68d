"""Train Nano Omni with Megatron's loop, as the MIMO entry of a Megatron-LM checkout does (examples/mimo).

    flags=$(nemotron3 flags nano-omni --tp 2 --dp 4 --shell -- --vision-layout tp=1,dp=4 …) || exit 2
    eval "ARGS=( $flags )"
    PYTHONPATH=$MEGATRON_LM_DIR torchrun … -m megatron_nemotron3.run pretrain_omni.py "${ARGS[@]}"

Process setup, forward step and loss are the checkout's; the loop, checkpoints and every other argument are
Megatron's own. The checkout's entry cannot be given another model, communicator or data, so this script takes
its place: `megatron_nemotron3.train.omni.entry` has what it puts there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from examples.mimo.training.distributed import initialize_distributed, shutdown_distributed
from examples.mimo.training.step import mimo_forward_step

from megatron_nemotron3.train.omni import arguments, entry


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Print what is wrong with the command line or the data in one line, and end with exit code 2."""
    try:
        yield
    except ValueError as problem:
        print(f"pretrain_omni.py: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    """Train as the command line says. Exit code 2: the layouts, the model or the data do not fit."""
    with _refusing():
        args = arguments.parse(sys.argv[1:])
    if args.distributed_backend != "nccl":  # on a CPU; the checkout knows nothing else than nccl
        torch.distributed.init_process_group(args.distributed_backend)
    initialize_distributed()
    with _refusing():
        entry.check_data(args)
    entry.train(args, mimo_forward_step)
    shutdown_distributed()


if __name__ == "__main__":
    main()
