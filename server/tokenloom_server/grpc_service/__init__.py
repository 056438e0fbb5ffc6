"""gRPC: the one place of the server that knows protobuf and gRPC."""

from tokenloom_server.grpc_service.server import GrpcServer

__all__ = ["GrpcServer"]
