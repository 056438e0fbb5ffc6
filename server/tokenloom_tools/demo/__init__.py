"""``tokenloom demo``: the whole job on real text, with every promise about the data checked at the end.

This package is an application, not a part of the server: it uses the server through its command line
and the client through ``import tokenloom``, as any user does. That makes it the one place that may
know both sides, which otherwise meet only in ``tokenloom_proto``.

    main        the order of events: build, serve, train, kill, resume, prove, report; and of a run to watch
    plan        its numbers, and the mixture file
    corpus      three corpora and a tokeniser from the text that Python carries
    trainer     trains a small GPT from a RemoteDataset: the example to copy from
    receipts    what a rank received, on disk; and reading without training: the uninterrupted run
    proof       what must be true of the receipts
    processes   child processes that end with their parent; ``api.parent_death`` is their first line. The
                server is one, with its stats over REST
    report      what is printed
"""
