"""Two systems disagree on log-probabilities: which deviates from the checkpoint, and why (docs/bisect.md)."""
