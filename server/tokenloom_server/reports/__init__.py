"""What people read about a run, as plain data and as text: statistics, receipts, traces, the mixture."""
