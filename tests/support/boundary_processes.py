"""Run ranks that may end independently of each other, without a barrier at the end."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.ranks import free_port, server
from megatron_nemotron3.proof.certify.ranks import PRELOAD

NOTHING = "(ended without a word)"


def run_apart(
    function: Callable[..., str], size: int, *args: Any, wait: float, timeout: float, tcp: bool = False
) -> list[str]:
    """What `function(*args)` returned or raised on every rank; NOTHING if the process just ended.

    Args:
        wait: seconds of every wait in the default process group.
        timeout: for the whole; what hangs then is killed and says so.
        tcp: rank 0 hosts the store of the default process group; otherwise it is a file.
    """
    context = server(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        store = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{folder}/store"
        processes = [
            context.Process(
                target=_rank, args=(function, args, rank, size, folder, store, wait, dict(os.environ))
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        found = []
        for rank, process in enumerate(processes):
            process.join(max(0.1, deadline - time.monotonic()))
            said = Path(folder, str(rank))
            found.append("(hangs)" if process.is_alive() else said.read_text() if said.exists() else NOTHING)
        for process in processes:
            process.kill()
            process.join()
        return found


def _rank(
    function: Callable[..., str],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    folder: str,
    store: str,
    wait: float,
    environment: dict[str, str],
) -> None:
    import torch

    from megatron_nemotron3.cpu import cpu_mode

    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    with cpu_mode():
        torch.distributed.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=wait),
        )
        try:
            said = function(*args)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        Path(folder, f"{rank}.part").write_text(said)
        os.rename(Path(folder, f"{rank}.part"), Path(folder, str(rank)))
        os._exit(0)
