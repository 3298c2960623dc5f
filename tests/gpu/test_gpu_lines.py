"""Lines that only a GPU executes are executed on a fake one, but for few; which, `python -m
tests.gpu.gpu_lines` says."""

import pytest

from tests.gpu.gpu_lines import gpu_lines, unexecuted

MOST = 36       # may only shrink: 28, and some of forked ranks that coverage follows now and then

SOURCE = """\
def f(device, x):
    if device.type == "cuda":
        a = 1
    else:
        a = 2
    if x.is_cuda and a:
        a = 3
    if device.type != "cuda":
        return a
    a = torch.cuda.device_count()
    return a

class Host:
    def __init__(self):
        self.stream = torch.cuda.Stream()

    def run(self):
        return 1

def g(on_gpu):
    b = torch.cuda.get_device_name() if on_gpu else ""
    return b
"""


def test_a_line_is_a_gpu_s_behind_a_condition_or_where_nothing_begins_without_one():
    assert gpu_lines(SOURCE) == {3, 7, 10, 11, 15, 18}


@pytest.mark.slow
def test_no_more_lines_wait_for_a_gpu():
    left = unexecuted()
    assert sum(map(len, left.values())) <= MOST, left
