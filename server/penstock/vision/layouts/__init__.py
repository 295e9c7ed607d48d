"""Output layouts: one module for each encoding of model outputs."""
