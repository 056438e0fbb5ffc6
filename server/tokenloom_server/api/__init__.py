"""The server's front: it translates between the network and the runs, and decides nothing.

In come gRPC calls (``grpc``) and HTTP requests (``rest``, with a module per resource, and ``page``); each is checked
against the tokens (``auth``) by the scope that stands beside its RPC or route. Out go what a run's owners answer.

``service`` finds a run by its name, ``served_run`` names the owner of each thing that is asked of it, ``metrics`` is
the table of all metrics, and ``server`` brings a server process up and closes it; ``grpc.local`` is one without a
socket.
"""
