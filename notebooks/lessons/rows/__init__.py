"""Techniques that one lesson studies: each module holds the rows of a family and their code.

A Config names a module under `imports`, or a command names it by `--import`:
`lpkit train optimizer=soap --import lessons.rows.optimizers`.
"""
