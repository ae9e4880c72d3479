"""The simulated device: the engine's decisions, checked without a model."""
