"""The commands `penstock video …`."""

from penstock.cli import Command

VIDEO = Command(
    "penstock_video.cli.commands",
    "app",
    "Watch cameras and files: detect, track, count, record.",
    extra="video",
    needs=("av", "trackers", "yaml"),
)
