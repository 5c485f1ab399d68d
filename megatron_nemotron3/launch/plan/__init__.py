"""What a training run costs: floating-point operations, memory, traffic, layouts. Closed forms."""
