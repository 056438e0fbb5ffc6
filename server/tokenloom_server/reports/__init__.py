"""Documents about a run, as models that REST, gRPC and the command line share, and the same as text for people.

``stats``, ``receipt`` and ``trace`` are the models; ``stats_text``, ``trace_text``, ``mixture_text`` and ``model_card``
print them, with the tables of ``tables``.
"""
