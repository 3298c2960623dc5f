"""Exercises and guesses: the processes that run a learner's code, the judge, the results."""
