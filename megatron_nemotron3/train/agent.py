"""torchrun for `nemotron3 train`: its agent ends with the command, and passes no signals on to the ranks."""

from torch.distributed.run import main

from megatron_nemotron3 import lifetime

if __name__ == "__main__":
    lifetime.agent()
    main()
