"""One rank's connection to a run's server: who the rank is, how it joins, and the stream of its micro-steps.

In: what a dataset asks for (``join.Request``). Out: micro-steps, in order, each with the point that the trainer has
reached after it. ``stream.Connection`` owns the gRPC channel and the reader thread; ``buffer.StepBuffer`` owns what
that thread and ``next()`` share. The only package that knows gRPC and wire types.
"""
