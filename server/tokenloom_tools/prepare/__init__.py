"""Sources prepared once: text becomes shards of ids, which are served at the speed of memory."""
