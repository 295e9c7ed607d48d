"""The embedded engine: ONNX Runtime in the gateway's own process, over Triton's repository layout.

repository           what lies on disk: folders, versions, config.pbtxt
repository_config    config.pbtxt completed and judged as Triton does it
loaded · loaded_warmup   one version in memory: its session, its threads, its warm-up
model · model_places     what became of a name · who may run, who waits
validation           a request against the config, in Triton's words
statistics · metrics what was counted
engine               EmbeddedEngine: the Backend
"""
