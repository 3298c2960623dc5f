"""One file per command of `lpkit`. Each has

    arguments(parser)    add its arguments
    run(args) -> dict    do it, and return one JSON-ready object; progress goes to standard error
    text(result) -> str  the same object for a person

A command imports what it needs inside `run`, so that `--help` is fast.
"""


def machine(target: str):
    """What `--machine` means: a row of the catalogue, `this` (measured now), or a YAML file. Raises
    ConfigError."""
    from pathlib import Path

    from lpkit.errors import ConfigError
    from lpkit.techniques import machines

    if target == "this":
        from lpkit import hardware

        return hardware.machine()
    if not target.endswith((".yaml", ".yml")):
        return machines.find(target)
    import yaml

    try:
        values = yaml.safe_load(Path(target).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the machine file {target!r} "
                          f"({' '.join(str(error).split())}); {machines.HOW}") from None
    return machines.from_dict(values, name=Path(target).stem)
