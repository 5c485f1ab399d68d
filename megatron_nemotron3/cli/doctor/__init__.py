"""`nemotron3 doctor`: checks whether an environment can train (versions, imports, GPU, one step)."""
