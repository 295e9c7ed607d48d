"""Where a model runs: tries it on CPU and GPU, compares the answers, and chooses engine and precision."""
