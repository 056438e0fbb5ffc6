"""The server that a training job starts for itself, where it is given a mixture file in place of an address.

In: the path of a mixture file. Out: the address and the credentials that a dataset joins with. A child process serves
all ranks of a launch; ``in_process`` serves one process without a socket, and is the only module that imports
the server.
"""
