"""The exercises of the course: one file per notebook, one judge.

Each `nNN.py` holds `EXERCISES = {"NN.name": Exercise(...)}`; this is the only place that knows them
all.
"""

from lpkit.course.exercises import n00, n01, n02, n03, n04, n05, n06, n07, n08, n09
from lpkit.course.exercises.judge import Exercise, Verdict, check

FILES: tuple[dict[str, Exercise], ...] = (n00.EXERCISES, n01.EXERCISES, n02.EXERCISES,
                                          n03.EXERCISES,
                                             n04.EXERCISES, n05.EXERCISES, n06.EXERCISES,
                                             # one row per notebook
                                             n07.EXERCISES, n08.EXERCISES, n09.EXERCISES)

EXERCISES: dict[str, Exercise] = {name: exercise for file in FILES
                                  for name, exercise in file.items()}

__all__ = ["EXERCISES", "Exercise", "Verdict", "check"]
