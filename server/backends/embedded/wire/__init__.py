"""The KServe v2 protocol over the embedded engine, answered as Triton answers it.

relay                   EmbeddedRelay: the Relay, over both protocols
http_routes             REST: which path asks what
http_request · http_raw · http_response    the body of an inference, and its answer
json_tensors · json_messages               tensors, and protobuf messages, as JSON has them
grpc_methods · grpc_messages               gRPC: which method asks what · its messages
asks · inference        what one inference asks for, and how it is run, whichever protocol it came by
classification          the extension: the largest values of an output
errors                  our errors as answers: the one table
server_metadata         who answers, with which extensions
"""
