"""What commands do outside a server: ``remote`` asks one over REST, ``peek`` reads samples over gRPC, ``export`` writes
them to files, ``verify`` compares the digests of two runs, and ``checkpoint`` reads a trainer's file. Nothing here owns
state of a run."""
