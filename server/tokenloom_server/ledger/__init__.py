"""The ledger: where the committed state of runs lives.

Enters: commands of the server that leads a run (``commands``). ``rules`` decides on each by the head of the run, and
SQLite or Redis owns what is stored. Leaves: a run's records, or the refusal of a command.
"""
