"""Pictures to tensors and model outputs to results."""
