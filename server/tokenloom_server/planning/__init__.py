"""The future of a run: a mixture as a fluid, whose tokens flow until its sources run dry."""
