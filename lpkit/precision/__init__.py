"""Low precision: number formats, scaling recipes, the Linear that runs under one, and who
multiplies."""
