"""The commands of `lpkit` in this package: one module per command, as in `lpkit.commands`."""
