"""A module per resource, each with ``add_routes``: its routes, the scope that each asks for, and its bodies."""
