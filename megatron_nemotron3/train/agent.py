"""torchrun for `nemotron3 train`: its agent ends with the command, and passes no signals on to the ranks."""

from torch.distributed.run import main

from megatron_nemotron3.common.processes import as_agent

if __name__ == "__main__":
    as_agent()
    main()
