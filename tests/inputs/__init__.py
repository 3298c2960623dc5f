"""What users bring, as tables: each case is right, or refused in one sentence.

A module here has `cases()`, which yields a name and a function. The function returns "right" or the sentence of the refusal; it raises
AssertionError for a result that is wrong without a word. Another exception is a traceback. `python -m tests.attack inputs` counts them all.
"""
