"""`nemotron3` and `python -m megatron_nemotron3`."""

from megatron_nemotron3 import lifetime


def main() -> int:
    """Entry point of the console script; returns the exit status."""
    with lifetime.leaving_at_interrupt("nemotron3"):
        from megatron_nemotron3 import cli
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
