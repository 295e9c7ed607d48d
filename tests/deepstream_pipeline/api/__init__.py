"""Tests of penstock_video.api, over real sockets and a pipeline that is none."""
