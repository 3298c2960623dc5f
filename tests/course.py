"""The exercises of all lessons, as tests and benches name them."""

from lpkit.course.lessons import exercises
from lpkit.course.puzzles import Puzzle
from lpkit.course.rank_exercises import OnRanks

EXERCISES = exercises()
PUZZLES = {name: one for name, one in EXERCISES.items() if isinstance(one, Puzzle)}
ON_RANKS = {name: one for name, one in EXERCISES.items() if isinstance(one, OnRanks)}
