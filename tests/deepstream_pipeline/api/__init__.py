"""Tests of deepstream_pipeline.api, over real sockets and a pipeline that is none."""
