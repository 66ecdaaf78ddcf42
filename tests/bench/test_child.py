"""Child processes: answers, errors, death, and standing still."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from bench_helpers import alive

from probjax.bench.child import Child, ChildDied, ChildTimeout, cpu_seconds
from probjax.bench.measure import Failed, Unavailable

SERVER = """
import json, os, signal, sys, threading, time
def spin():
    while True:
        pass
for line in sys.stdin:
    request = json.loads(line)
    op = request["op"]
    answer = {"echo": request}
    if op == "fail":
        answer = {"error": "no such thing"}
    if op == "unavailable":
        answer = {"error": "not here", "unavailable": True}
    if op == "spin":
        threading.Thread(target=spin, daemon=True).start()
    if op == "hang":
        time.sleep(1000)
    if op == "crash":
        print("the reason", file=sys.stderr)
        sys.exit(7)
    if op == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def child():
    with Child([sys.executable, "-c", SERVER]) as child:
        yield child


def test_requests_are_answered_in_order(child):
    for number in range(20):
        assert child.request(20, op="echo", number=number)["echo"]["number"] == number


def test_long_answers_are_whole(child):
    text = "x" * 300_000
    assert child.request(20, op="echo", text=text)["echo"]["text"] == text


def test_an_error_is_raised_and_the_child_goes_on(child):
    with pytest.raises(Failed, match="no such thing"):
        child.request(20, op="fail")
    with pytest.raises(Unavailable, match="not here"):
        child.request(20, op="unavailable")
    assert child.request(20, op="echo")["echo"]["op"] == "echo"


def test_a_child_that_ends_tells_its_last_words(child):
    with pytest.raises(ChildDied, match="ended with code 7: the reason"):
        child.request(20, op="crash")
    with pytest.raises(ChildDied):
        child.request(20, op="echo")


def test_a_child_that_aborts_names_the_signal(child):
    with pytest.raises(ChildDied, match="SIGABRT"):
        child.request(20, op="abort")


def test_a_child_killed_while_it_stands_still_is_noticed(child):
    child.request(20, op="echo")
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="SIGKILL"):
        child.request(20, op="echo")


def test_a_child_that_hangs_is_ended(child):
    with pytest.raises(ChildTimeout, match=r"0\.2 s to 'hang'"):
        child.request(0.2, op="hang")
    assert not child.alive
    with pytest.raises(ChildDied):
        child.request(20, op="echo")


def test_close_ends_a_stopped_child(child):
    child.request(20, op="echo")
    child.close()
    assert not alive(child.pid)
    child.close()


def test_a_program_that_does_not_exist():
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/program"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads another process's clock")
@pytest.mark.parametrize("pause", [True, False])
def test_a_child_with_busy_threads_stands_still_between_requests(pause):
    with Child([sys.executable, "-c", SERVER], pause=pause) as child:
        child.request(20, op="spin")
        before = cpu_seconds(child.pid)
        time.sleep(0.3)
        used = cpu_seconds(child.pid) - before
        assert child.request(20, op="echo")
        if pause:
            assert used == 0
            assert child.asleep_cpu_s == 0
        else:
            # Without the pause the thread does take time: the test above can tell.
            assert used > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel ends the child")
def test_a_stopped_torch_child_ends_with_its_parent(tmp_path):
    """The parent is killed without a chance to clean up while the child stands still."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from probjax.bench.child import Child
        code = "import sys; from probjax.bench.attention.torch_child import die_with_parent;"
        code += "die_with_parent(int(sys.argv[1]));"
        code += "[print('{}', flush=True) for line in sys.stdin]"
        child = Child([sys.executable, "-c", code])
        child.request(20, op="any")
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(pid)
