"""KServe v2 inference as Triton reads and writes it, whoever computes it: the embedded engine, or a batch of ours.

asks                    what one inference asks for, whichever protocol it came by
http_request · http_raw · http_response    the body of an inference over REST, and its answer
json_tensors            tensors as JSON has them
grpc_messages           the messages of GRPCInferenceService
regions                 what a tensor says of the shared memory that it stands in
validation              a request against the model's config
classification          the extension: the largest values of an output
errors                  our errors as answers: the one table
threads                 long work on bytes, off the event loop
"""
