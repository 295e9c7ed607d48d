"""Image decoding and preprocessing, and parsing of model outputs into results."""
