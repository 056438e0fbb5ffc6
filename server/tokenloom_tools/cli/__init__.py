"""The command line: a module per command or group of commands, each of which wires together what it needs."""
