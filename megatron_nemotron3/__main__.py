"""`python -m megatron_nemotron3` is the `nemotron3` command."""

from megatron_nemotron3.cli import main

raise SystemExit(main())
