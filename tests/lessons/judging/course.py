"""The exercises of all lessons, as tests and benches name them."""

from lessons.judging.index import exercises
from lessons.judging.puzzles import Puzzle
from lessons.ranks.on_ranks import OnRanks

EXERCISES = exercises()
PUZZLES = {name: exercise for name, exercise in EXERCISES.items() if isinstance(exercise, Puzzle)}
ON_RANKS = {name: exercise for name, exercise in EXERCISES.items() if isinstance(exercise, OnRanks)}


def imported(place, given):
    """In a rank: whose parent has imported this module, and with it the lessons."""
