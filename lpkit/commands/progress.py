"""Show how far the learners of a room are, if they agreed to report it. Reports have random names.

    lpkit progress                          show how many learners solved each exercise
    lpkit progress --csv reports.csv        write every report to a table
    lpkit progress --delete                 delete all reports and random names; homes stay
    lpkit progress --collect */learner.json --csv reports.csv     read files that learners handed in

The teacher sees the same numbers live at /services/progress/ of the hub.
"""

from lpkit.commands import hosting

progress = hosting("progress")
arguments, run, text = progress.arguments, progress.run, progress.text
