"""Open a room: a JupyterHub on this machine for a workshop, with a lab for each learner.

  lpkit room --learners 30                       make learner01 to learner30, and their codes
  lpkit room anna ben --folder /srv/friday       make anna and ben; the folder opens the room again
  lpkit room --learners 30 --address 0.0.0.0 --tls cert.pem key.pem

Each learner has a Unix user, a home, and a share of the memory and threads. Print codes.csv in the
folder of the room: it has the names and codes. This terminal prints how many labs are open and
names labs that do not start. Ctrl-C ends all labs; homes stay.
LPKIT_SOLUTIONS sets when exercises show a solution: always, attempted (default) or solved.
"""

from lpkit.commands import hosting

opening = hosting("opening")
arguments, run, text = opening.arguments, opening.run, opening.text
