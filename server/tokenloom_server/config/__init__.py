"""The mixture file: from YAML to a checked, frozen description of a run, and what two of them differ in."""
