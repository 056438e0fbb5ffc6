"""Work that is done elsewhere: in threads and processes of this machine, and, in ``cluster``, on a cluster of Ray."""
