"""Records to figures: summaries, measurements, confidence intervals and comparisons."""
