"""Show how far a room's learners are: reports of those who agreed, under random names.

    lpkit progress                          where learners of the room in /srv/lpkit-room stop
    lpkit progress --csv reports.csv        every report, as a table
    lpkit progress --delete                 all of it, with the drawn names; homes stay
    lpkit progress --collect */learner.json --csv reports.csv     of files that learners handed in

The teacher sees the same live at /services/progress/ of the hub.
"""

from lpkit.commands import lesson

progress = lesson("progress")
arguments, run, text = progress.arguments, progress.run, progress.text
