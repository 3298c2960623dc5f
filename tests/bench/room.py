"""Thirty learners in one room: how long they wait, what an idle one takes, and what none may do.

A room is opened as `lpkit room` opens it, by root. One learner works alone in it at first: cells of
some tens of milliseconds, with pauses in which a person reads. Then all labs are started at once,
and all learners work like that together. One tries to read what is another's; the service of
reports is killed while they report.
"""

import random
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.bench.harness import ROUNDS, Result, paired
from tests.hosting import rooms

LEARNERS, CELLS, READING_SECONDS, KILLS, SENT = 30, 20, 4.0, 20, 20
BUDGET_SECONDS, TIMES, PORT = 120.0, 3.0, 8571
# who report without end while the service is killed
REPORTERS = tuple(f"reporter{n}" for n in range(5))
PACKAGES = ("jupyterhub", "jupyterlab", "ipykernel", "torch")
BEGIN = "import time, torch; x = torch.randn(256, 256)"
CELL = ("for _ in range(20): x = torch.nn.functional.layer_norm((x @ "
        "x).to(torch.bfloat16).float(), [256])")
REPORT = ("import time\nfrom lessons.reports import report\nfor i in range({}): report('exercise', "
          "name=f'03.{{i}}', verdict='right'); time.sleep(0.5)")
READER = '''
import glob, os
def tries(place, pid):
    yield from (lambda path=path: open(path, "rb").read(1) for path in (
        f"{place}/course/00_start_here.ipynb", f"{place}/course/lessons/judging/judge.py", \
f"{place}/.local/share/lpkit/course/learner.json",
        f"{place}/.room/jupyter_server_config.json", f"{place}/../../room.json", \
f"{place}/../../codes.csv", f"{place}/../../hub/hub.sqlite",
        f"{place}/../../hub/cookie_secret", \
f"{place}/../../hub/labs/{os.path.basename(place)}.log", f"{place}/../../hub/labs.json", \
f"{place}/../../progress.jsonl", f"{place}/../../pseudonyms.json", f"/proc/{pid}/environ",
        f"/proc/{pid}/mem"))
    yield from (lambda path=path: os.listdir(path) for path in (place, f"{place}/course", \
f"{place}/tmp", f"/proc/{pid}/fd", f"{place}/../"))
    yield lambda: os.kill(pid, 0)
    yield lambda: open(f"{place}/course/new", "w")
    yield lambda: os.rename(place, place + "x")
read = asked = 0
for place, pid in THEIRS:
    for attempt in tries(place, pid):
        asked += 1
        try:
            attempt()
            read += 1
        except OSError:
            pass
print(read, asked)
'''


def run(rounds: int = ROUNDS) -> list[Result]:
    """Errors: RuntimeError where no room can be opened here."""
    if why := rooms.why_no_room():
        raise RuntimeError(why)
    with rooms.passable_folder() as folder, rooms.opened(folder, *REPORTERS, "--learners",
            str(LEARNERS), port=PORT) as room:
        return measured(folder, room["url"])


def measured(folder: Path, url: str) -> list[Result]:
    codes = rooms.codes(folder)
    first, *others = [rooms.Person(url, name, code) for name, code in codes.items()
                      if name not in {"teacher", *REPORTERS}]
    reporters = [rooms.Person(url, name, codes[name]) for name in REPORTERS]
    first.start(share=True)
    first.run(BEGIN)
    alone = at_work(first)
    with ThreadPoolExecutor(LEARNERS + 2 * len(reporters)) as pool:
        begun = time.monotonic()
        list(pool.map(lambda person: person.start(share=True), [*others, *reporters]))
        up = time.monotonic() - begun
        time.sleep(10)
        idle = statistics.median(memory_bytes(folder, person.name) for person in others)
        killing = pool.submit(kill_service, folder / "progress.jsonl")
        sending = [pool.submit(reported_until, killing, reporter) for reporter in reporters]
        list(pool.map(lambda person: person.run(BEGIN), others))
        working = statistics.median(memory_bytes(folder, person.name) for person in others)
        together = [seconds for own in pool.map(at_work, [first, *others]) for seconds in own]
        kills, sent = killing.result(), sum(future.result() for future in sending)
    teacher, deadline = rooms.Person(url, "teacher", codes["teacher"]), time.monotonic() + 180
    mine, address = [], f"{url}/services/progress/now"
    while len(mine) < sent and time.monotonic() < deadline:
        time.sleep(1)       # the service was killed just now
        if rooms.status(address, teacher.token) == 200:
            mine = rooms.ask(address, token=teacher.token)["events"]
    kept = len({event["id"] for event in mine})
    theirs = [(str(folder / "learners" / person.name), pids(folder, person.name)[0])
              for person in others[:11]]
    read, asked = map(int, first.run(f"THEIRS = {theirs!r}\n{READER}").split())
    facts = {"learners": LEARNERS, "pause_seconds": READING_SECONDS, "idle_learner_bytes": idle,
             "learner_with_kernel_bytes": working, "reads": read, "reads_asked": asked,
             "service_kills": kills, "reports_sent": sent, "reports_kept": len(mine),
             "reports_kept_once": kept,
             "p95_alone_seconds": p95(alone), "p95_together_seconds": p95(together)}
    common = {"better": "lower", "packages": PACKAGES, "facts": facts}
    return [paired("room", case=f"{LEARNERS} labs started at once", ours=[up],
                   peer=[BUDGET_SECONDS], peer_name="a budget of 2 minutes", target=1.0, **common),
            paired("room", case=f"a cell of {LEARNERS} learners, 95th percentile",
                   ours=[p95(together)], peer=[p95(alone)], peer_name="alone", target=TIMES,
                   **common),
            paired("room", case="reads of another's files that were let through", ours=[read],
                   peer=[asked], peer_name="attempts", target=0.0, unit="reads", **common),
            paired("room", case=f"reports lost in {kills} kills of the service", ours=[sent - kept],
                   peer=[sent], peer_name="reports",
                   target=0.0, unit="reports", **common)]


def at_work(person: rooms.Person) -> list[float]:
    """Seconds of each cell, from the click to its end, with pauses as long as a person reads."""
    chance, seconds = random.Random(person.name), []
    for _ in range(CELLS):
        time.sleep(chance.expovariate(1 / READING_SECONDS))
        begun = time.monotonic()
        assert not (output := person.run(CELL)), output
        seconds.append(time.monotonic() - begun)
    return seconds


def reported_until(over: Future, reporter: rooms.Person) -> int:
    """How many reports were made until then."""
    sent = 0
    while not over.done():
        assert not (output := reporter.run(REPORT.format(SENT))), output
        sent += SENT
    return sent


def p95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def service() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]
            and process.info["cmdline"][-1].endswith("from hosting.progress import main; main()")]


def kill_service(path: Path) -> int:
    """Kills it KILLS times, each as it keeps reports: soon after it has kept the first. The hub
    looks for it each 30 s."""
    chance, deadline = random.Random(0), time.monotonic() + 90 * KILLS
    for kills in range(KILLS):
        before = path.stat().st_size if path.exists() else 0
        while not (path.exists() and path.stat().st_size > before):
            if time.monotonic() > deadline:
                return kills
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 1.0))
        for process in service():
            process.kill()
    return KILLS


def pids(folder: Path, name: str) -> list[int]:
    uid = (folder / "learners" / name).stat().st_uid
    return [process.pid for process in psutil.process_iter(["uids"]) if process.info["uids"]
            and process.info["uids"].real == uid]


def memory_bytes(folder: Path, name: str) -> int:
    """Of all processes of a learner; what processes share counts once, in parts (PSS)."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids(folder, name))
