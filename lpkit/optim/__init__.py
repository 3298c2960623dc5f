"""Update rules, and the stepper that applies any of them: where state is, its format, rounding."""
