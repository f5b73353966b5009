"""The parts of the embedded backend: continuous batching in torch over a transformers model, in one thread."""
