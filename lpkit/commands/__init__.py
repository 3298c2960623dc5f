"""One file per command of `lpkit`. Each has

    arguments(parser)    add its arguments
    run(args) -> dict    do it, and return one JSON-ready object; progress goes to standard error
    text(result) -> str  the same object for a person

A command imports what it needs inside `run`, so that `--help` is fast.
"""
