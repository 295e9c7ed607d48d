"""The KServe v2 protocol: tensors, requests, responses, errors, and their HTTP and gRPC encodings."""
