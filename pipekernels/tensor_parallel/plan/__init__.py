"""Whole models: which of their layers are sharded, and how that is undone, loaded and saved."""
