"""Output layouts: one module for each way in which models encode their results."""
