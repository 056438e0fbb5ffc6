"""A module per resource, each with ``ROUTES``: its routes, the scope that each asks for, and its bodies."""
