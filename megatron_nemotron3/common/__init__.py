"""Files, locks, processes, ranks, options and output: what the other rooms import. It imports none of them."""
