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
    """Hear of one attempt, and say what there is to say."""
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
            finding = index.exercise(job["name"]).found(job, line.fileno())
        except ConnectionError:
            raise
        except ConfigError as error:    # of a lesson that is broken now
            finding = {"status": "to do", "detail": str(error)}
        except Exception:           # they are of a shape that no case has
            finding = {"status": "wrong", "detail": NO_ANSWERS}
        sweep()                     # before the nonce comes: nothing that is hostile hears it
        line.sendall(b"?")
        line.sendall(line.recv(64) + json.dumps(finding).encode())


def main(folder: str, calls: str) -> int:
    """Fork a judge for each socket that comes."""
    end_with_parent()
    os.environ["TMPDIR"] = folder   # which the keeper removes
    # on Linux the same user's processes cannot look into this one, nor into its forks
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # by Python 3.12: the threads are a library's that wait, and a fork begins none of their work
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    with socket.socket(fileno=int(calls)) as heard:
        while (call := socket.recv_fds(heard, 4096, 1))[0]:
            with contextlib.suppress(Exception):    # once, for all forks; a fork says what is wrong
                index.exercise(call[0].decode()).prepare()
            with socket.socket(fileno=call[1][0]) as line:
                if os.fork():
                    continue
                try:
                    heard.close()
                    judge(line)
                except ConnectionError:
                    pass            # nobody waits for it any more
                except BaseException:
                    traceback.print_exc()
                finally:
                    sweep()
                    os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
