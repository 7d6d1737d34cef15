"""Bounds on rounding errors."""


def gamma(terms: int, unit: float) -> float:
    """Relative error bound of a sum of products with ``terms`` roundings (Higham, 2002, 3.1)."""
    return terms * unit / (1 - terms * unit)
