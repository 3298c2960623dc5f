"""Rows: what anybody needs to know of a technique without running it. No torch."""
