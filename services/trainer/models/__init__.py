"""Model families: how the tensors of a Hugging Face model become the parameters of a backend that has its own model."""
