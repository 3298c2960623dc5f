"""The lessons: beside each notebook a module with its study, its figures and its exercises.

They are there to be read, and a copy of them to be changed: `lpkit lab --reset 06` brings notebook 06
and its lesson back as the course has them. What several lessons need is in `lpkit`.
"""
