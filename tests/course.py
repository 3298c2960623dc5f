"""The exercises of all lessons, as tests and benches name them."""

from lessons.index import exercises
from lessons.on_ranks import OnRanks
from lessons.puzzles import Puzzle

EXERCISES = exercises()
PUZZLES = {name: one for name, one in EXERCISES.items() if isinstance(one, Puzzle)}
ON_RANKS = {name: one for name, one in EXERCISES.items() if isinstance(one, OnRanks)}


def imported(place, told):
    """In a rank: whose parent has imported this module, and with it the lessons."""
