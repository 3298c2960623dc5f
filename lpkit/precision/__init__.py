"""Low precision: the Linear that runs under a recipe, and the backends that multiply. Formats and
recipes are rows of `lpkit.techniques`."""
