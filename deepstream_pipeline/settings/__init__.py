"""What an operator can say of the video program: a YAML file in DeepStream's words, and flags."""
