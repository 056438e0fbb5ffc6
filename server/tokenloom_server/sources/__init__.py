"""Sources: rows from files, in a fixed order, from any cursor."""
