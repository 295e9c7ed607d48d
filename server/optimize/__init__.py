"""`penstock models optimize`: a float model to an INT8 one, with what changed: operators, answers, speed.

    source → samples → quantise (ranges, recipes) → agreement | accuracy → timing → fusion → folder

The heavy imports of it (onnx, onnxruntime's quantiser) are paid here, by nobody else.
"""
