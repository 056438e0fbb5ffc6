"""From the bytes of one message to the batches of its micro-steps.

In: a message as it travelled, and the layout that the server's answer to the Join gave. Out: a dictionary of numpy
arrays (``arrays.ArrayMaker``) or of tensors (``tensors.TensorMaker``, ``tensors.Transfer``) for each micro-step.
``tensors`` alone imports torch. Nothing here knows of gRPC, threads or datasets.
"""
