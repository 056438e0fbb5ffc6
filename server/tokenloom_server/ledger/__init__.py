"""The ledger: where the committed state of runs lives.

Enters: commands of the server that leads a run (``commands``). ``rules`` decides on each by the head of the run, and
SQLite or Redis owns what is stored. Leaves: a run's records, or the refusal of a command.

Who writes, and what a write has to name:

| command | written by | names |
|---|---|---|
| Create | ``Ledger.create_run``: ``api.service``, ``run.leadership``, ``run.evaluation_streams`` | a new run |
| Import | ``ledger`` of the tools | a whole run, from elsewhere |
| Move | ``ledger`` of the tools | server epoch; where the run is from now on |
| Acquire | ``run.leadership``; ``ledger`` of the tools | its holder; gives the next server epoch |
| Renew, Release | ``run.leadership``; ``ledger`` of the tools | server epoch |
| Open, Adopt | ``run.attempts``, ``run.join`` | server epoch |
| ClaimSlot | ``run.attempts``, ``run.sessions`` | server epoch, generation |
| Commit, ThinJournal | ``run.committer`` | server epoch; a commit its generation, too |
| Revise, DropRevisions | ``run.revise`` | server epoch |
| Pin | ``run.pins`` | server epoch |
| SaveSnapshot | ``run.snapshots`` | the run's uid: it changes neither the committed state nor the lease |
"""
