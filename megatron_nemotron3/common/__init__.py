"""What every other part stands on: locks, processes, ranks. Imports no other part."""
