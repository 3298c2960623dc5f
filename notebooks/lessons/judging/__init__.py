"""Exercises and guesses: where a learner's code runs, who judges it, and what a learner has made."""
