"""The exercises of all lessons, as tests and benches name them."""

from lessons.judging.index import exercises
from lessons.judging.puzzles import Puzzle
from lessons.ranks.on_ranks import OnRanks

EXERCISES = exercises()
PUZZLES = {name: one for name, one in EXERCISES.items() if isinstance(one, Puzzle)}
ON_RANKS = {name: one for name, one in EXERCISES.items() if isinstance(one, OnRanks)}


def imported(place, told):
    """In a rank: whose parent has imported this module, and with it the lessons."""
