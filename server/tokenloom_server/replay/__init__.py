"""Any sample of a run made again: peeks, traces, receipts, evaluations. No counter of the run moves."""
