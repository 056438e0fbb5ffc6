"""Work that runs on other machines, by Ray: shards that are prepared there, and rows that are read for a server."""
