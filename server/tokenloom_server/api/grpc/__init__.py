"""gRPC: the one place of the server that knows protobuf and gRPC."""

from tokenloom_server.api.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
