"""Tables of what people bring: each case is right, or refused in one sentence. `cases()` of a module yields (name, case); `case()` returns
"right" or the sentence, and raises AssertionError for a silent wrong result, a traceback, or a refusal of what should be right."""
