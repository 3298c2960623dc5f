"""The warm process of `lessons.judging.attempts`, and the judge that it forks for each check.

    python -m lessons.judging.judge_process FOLDER SOCKET
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
import warnings

import torch

from lessons.judging import index
from lessons.judging.attempts import NO_ANSWERS, Frames
from lpkit.errors import ConfigError
from lpkit.processes import PR_SET_DUMPABLE, adopt_orphans, end_with_parent, prctl, sweep


def judge(line: socket.socket) -> None:
    """Receive one job on `line`, judge its attempt, and send the finding. The protocol is that of
    `lessons.judging.attempts.asked`."""
    end_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(1)
    frames, jobs = Frames(line.fileno()), []
    while not jobs and not frames.over:
        frames.read()
        jobs = list(frames)
    for job in jobs:
        try:
            finding = index.exercise(job["name"]).outcome(job, line.fileno())
        except ConnectionError:
            raise
        except ConfigError as error:    # the lesson itself is broken
            finding = {"status": "to do", "detail": str(error)}
        except Exception:           # the answers have a shape that fits no case
            finding = {"status": "wrong", "detail": NO_ANSWERS}
        sweep()                     # kills the attempt's processes before the nonce is received
        line.sendall(b"?")
        line.sendall(line.recv(64) + json.dumps(finding).encode())


def main(folder: str, calls: str) -> int:
    """Fork a judge for each socket that arrives on the socket with file number `calls`. `folder`:
    for temporary files. This process imports torch once; its forks start at once."""
    end_with_parent()
    os.environ["TMPDIR"] = folder   # the process that started this process removes the folder
    # on Linux, processes of the same user cannot look into this process or its forks
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Python 3.12 warns; the threads belong to a library and wait, and forks do not use them
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    with socket.socket(fileno=int(calls)) as heard:
        while (call := socket.recv_fds(heard, 4096, 1))[0]:
            # imports modules once for all forks; the fork's own import reports an error
            with contextlib.suppress(Exception):
                index.exercise(call[0].decode()).prepare()
            with socket.socket(fileno=call[1][0]) as line:
                if os.fork():
                    continue
                try:
                    heard.close()
                    judge(line)
                except ConnectionError:
                    pass            # the caller has gone
                except BaseException:
                    traceback.print_exc()
                finally:
                    sweep()
                    os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
