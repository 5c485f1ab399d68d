"""What every other room stands on: files, locks, processes, ranks, options, output. It imports no other room."""
