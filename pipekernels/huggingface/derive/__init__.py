"""Plans for models that carry none and have no table."""
