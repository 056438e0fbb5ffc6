"""Documents about a run, as models that REST, gRPC and the command line share: its figures, its history, the list of
runs."""
