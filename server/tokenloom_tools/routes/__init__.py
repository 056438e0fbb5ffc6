"""REST routes that an entry point hands to the server: plans, receipts, traces."""
