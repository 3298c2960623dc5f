"""The course without a browser: notebooks with parameters, and what they claim.

A notebook has a cell of declared parameters, a folded cell of imports and one of sizes, then
Predict (a guess and a formula), Run (a measurement), Reconcile (the comparison, and the claim), By
hand (the mechanism in plain PyTorch, asserted equal to the package's), Exercise, Further reading;
tests/course/test_notebooks.py holds every notebook to that. Beside it lies its lesson, a module with its
study, its figures and its exercises, which `lessons.judging.judge` judges. `notebooks/hosting` serves
both to learners.
"""
