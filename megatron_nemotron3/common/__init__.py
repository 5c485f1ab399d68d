"""Files, locks, processes, ranks, options and output: other rooms import them. It imports none of them."""
