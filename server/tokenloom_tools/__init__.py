"""What stands around the service: the command line, and what looks at runs, prepares for them, moves to them and shows
them. The service (``tokenloom_server``) imports nothing of it."""
