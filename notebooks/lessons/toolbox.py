"""The names that most notebooks use: figures, guesses, comparisons, claims and tables.

A notebook imports these names from here in one line, and other names from its lesson's module.
"""

from IPython.display import HTML

from lessons.claims import cannot_tell
from lessons.figures.comparison import comparison_figure
from lessons.figures.explorer import Explorer
from lessons.figures.figure import Figure
from lessons.goals import goal
from lessons.judging.learner import check, keep
from lessons.judging.questions import Guess, Pick
from lessons.reading import source
from lessons.reports import claim
from lpkit.predict.compare import Comparison, Row
from lpkit.tables import html_table

__all__ = ["HTML", "Comparison", "Explorer", "Figure", "Guess", "Pick", "Row", "cannot_tell",
           "check", "claim", "comparison_figure", "goal", "html_table", "keep", "source"]
