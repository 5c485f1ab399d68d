"""What all other rooms stand on: files, locks, processes, ranks, options and output. It imports none of them."""
