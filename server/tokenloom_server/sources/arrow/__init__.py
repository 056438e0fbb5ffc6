"""Arrow IPC files in a folder that `save_to_disk` wrote."""
