"""The KServe v2 protocol over the embedded engine, answered as Triton answers it; `backends/wire` has its forms.

relay                   EmbeddedRelay: the Relay, over both protocols
http_routes             REST: which path asks what
json_messages           protobuf messages as JSON has them
generate                the generate extension
grpc_methods · grpc_stream    gRPC: which method asks what · ModelStreamInfer
inference               how an inference is run, whichever protocol it came by
shared_tensors          tensors that stand in shared memory
server_metadata         who answers, with which extensions
"""
