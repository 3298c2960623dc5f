"""The commands of `lpkit` that this package has: a file for each, as in `lpkit.commands`."""
