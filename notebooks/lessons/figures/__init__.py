"""Figures: their look, their parts, live runs, and the still pictures of them."""
