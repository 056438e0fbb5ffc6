"""gRPC: the one place of the server that knows protobuf and gRPC."""
