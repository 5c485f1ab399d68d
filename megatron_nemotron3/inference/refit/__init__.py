"""Weights from a trainer's ranks to an inference engine's, without a file, planned ahead and proved after."""
