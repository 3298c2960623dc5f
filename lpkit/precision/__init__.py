"""Low precision: number formats, scaling recipes, the Linear that runs under a recipe, and the
backends that multiply."""
