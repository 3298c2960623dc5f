"""Ranks of a lesson: their messages and clocks, and exercises that run on several processes."""
