"""Generation from a checkpoint, and weights from a trainer to an inference engine."""
