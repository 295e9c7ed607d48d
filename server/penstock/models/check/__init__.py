"""Golden checks: recorded outputs of a model, and the comparison of new outputs with them."""
