"""The server's front: gRPC, REST, the page, metrics, access; it translates and decides nothing."""
