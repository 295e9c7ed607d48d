"""Settings of the video program: a YAML file in DeepStream's terms, and command-line flags."""
