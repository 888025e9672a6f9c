"""Real processes: what is said arrives, and nothing is left behind."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import leftover_processes, wait_for_no_leftovers

from orbax_reshard.tools import launch

pytestmark = pytest.mark.usefixtures("no_leftovers")

# Far above what any of these needs; only a hang reaches it.
TIMEOUT_SECONDS = 90.0

ALLGATHER = """
import os, sys
from orbax_reshard.tools import launch
index = launch.initialize_from_environment()
import jax, numpy as np
from jax.experimental import multihost_utils
got = multihost_utils.process_allgather(np.uint32([index]))
launch.emit({"index": index, "devices": jax.device_count(), "got": got.tolist()})
print(f"plain line {index}")
"""


def run(program: str, **kwargs):
    options = {
        "num_processes": 2,
        "devices_per_process": 3,
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    return launch.run_cluster(("-c", textwrap.dedent(program)), **(options | kwargs))


def test_processes_form_a_cluster_and_report():
    lines, messages = [], []
    results = run(
        ALLGATHER,
        on_line=lambda index, line: lines.append((index, line)),
        on_message=lambda index, value: messages.append((index, value)),
    )
    launch.raise_for_failure(results)
    for index, result in enumerate(results):
        assert result.process_index == index
        assert (result.outcome, result.returncode) == ("succeeded", 0)
        expected = {"index": index, "devices": 6, "got": [[0], [1]]}
        assert result.messages == (expected,)
        assert (index, expected) in messages
        # Gloo prints whenever it likes, also in front of our words in the same line.
        assert any(i == index and f"plain line {i}" in line for i, line in lines)
        assert f"plain line {index}" in result.stdout
        assert 0 < result.seconds < TIMEOUT_SECONDS


def test_device_count_of_the_parent_is_not_inherited():
    # conftest has put 16 into this process's XLA_FLAGS.
    assert "device_count=16" in os.environ["XLA_FLAGS"]
    env = launch.child_environment(3)
    assert env["XLA_FLAGS"].split()[-1] == "--xla_force_host_platform_device_count=3"
    assert "=16" not in env["XLA_FLAGS"]


def test_environment_keeps_other_flags_and_drops_proxies(monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=9"
    )
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    env = launch.child_environment(2)
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=2"
    assert "HTTPS_PROXY" not in env and "JAX_LOCAL_DEVICE_IDS" not in env


def test_one_failure_ends_the_others(monkeypatch):
    monkeypatch.setattr("orbax_reshard.tools.supervised._SIBLING_GRACE_SECONDS", 0.5)
    started = time.monotonic()
    results = run(
        """
        import os, time
        if os.environ["ORESH_PROCESS_ID"] == "1":
            raise OSError("the disk is gone")
        time.sleep(600)
        """,
        num_processes=3,
    )
    assert time.monotonic() - started < 30
    assert [r.outcome for r in results] == ["ended", "failed", "ended"]
    assert results[1].returncode == 1
    assert results[0].returncode == -signal.SIGTERM
    assert "the disk is gone" in results[1].stderr_tail
    with pytest.raises(launch.ClusterError) as caught:
        launch.raise_for_failure(results)
    assert caught.value.code == "cluster_failed"
    assert "Process 1 of 3 ended with exit status 1 after" in str(caught.value)
    assert "the disk is gone" in str(caught.value)


def test_the_others_may_report_within_the_grace():
    results = run(
        """
        import os, sys, time
        if os.environ["ORESH_PROCESS_ID"] == "1":
            time.sleep(1)
        sys.exit(f"host {os.environ['ORESH_PROCESS_ID']} saw it")
        """
    )
    assert [r.outcome for r in results] == ["failed", "failed"]
    assert [r.stderr_tail for r in results] == ["host 0 saw it", "host 1 saw it"]
    with pytest.raises(launch.ClusterError, match="host 0 saw it"):  # the earliest
        launch.raise_for_failure(results)


def test_a_hang_is_ended_at_the_time_limit():
    results = run(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX's preemption service
        print("started", flush=True)
        if os.environ["ORESH_PROCESS_ID"] == "0":
            time.sleep(600)
        """,
        timeout_seconds=3,
    )
    assert [r.outcome for r in results] == ["timed_out", "succeeded"]
    assert results[0].returncode == -signal.SIGKILL
    assert results[0].stdout == "started"
    with pytest.raises(launch.ClusterError) as caught:
        launch.raise_for_failure(results)
    assert caught.value.code == "cluster_timed_out"
    assert "was still running at the time limit after 3." in str(caught.value)


def test_a_hang_inside_the_cluster_shows_its_stack():
    # Process 1 never comes to the collective. SIGTERM at the limit writes stacks.
    results = run(
        """
        from orbax_reshard.tools import launch
        index = launch.initialize_from_environment()
        import time
        from jax.experimental import multihost_utils

        def a_name_to_look_for():
            time.sleep(600)

        a_name_to_look_for() if index else multihost_utils.sync_global_devices("x")
        """,
        timeout_seconds=12,
    )
    assert [r.outcome for r in results] == ["timed_out", "timed_out"]
    assert "a_name_to_look_for" in results[1].stderr_tail


def test_a_failure_inside_the_cluster_does_not_wait_for_the_others(monkeypatch):
    monkeypatch.setattr("orbax_reshard.tools.supervised._SIBLING_GRACE_SECONDS", 0.5)
    # JAX's shutdown barrier would hold process 1 back until process 0 comes, or for
    # a minute; process 0 waits in a collective for process 1.
    started = time.monotonic()
    results = run(
        """
        from orbax_reshard.tools import launch
        index = launch.initialize_from_environment()
        from jax.experimental import multihost_utils
        if index:
            raise OSError("the disk is gone")
        multihost_utils.sync_global_devices("x")
        """,
    )
    assert time.monotonic() - started < 40
    assert results[1].outcome == "failed" and results[1].returncode == 1
    assert results[1].stderr_tail.endswith("OSError: the disk is gone")
    assert results[0].outcome in ("failed", "ended")


def test_a_destructor_that_hangs_does_not_hang_the_exit(monkeypatch, tmp_path):
    # As that of a JAX client may, see `child_main`; here with one that always does.
    program = """
    import time
    class Client:
        def __del__(self):
            time.sleep(600)
    client = Client()
    """
    (result,) = run(program, num_processes=1)
    assert (result.outcome, result.seconds < 10) == ("succeeded", True)

    plain = tmp_path / "plain.py"
    plain.write_text("import os, sys; os.execv(sys.executable, ['p', *sys.argv[1:]])")
    monkeypatch.setattr(launch, "_CHILD_MAIN", str(plain))
    (result,) = run(program, num_processes=1, timeout_seconds=3)
    assert result.outcome == "timed_out"


@pytest.mark.parametrize(
    ("program", "status", "stderr"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os._exit(5)", 5, ""),
        ("import atexit; atexit.register(print, 'bye')", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, ""),
    ],
)
def test_the_status_of_the_program_is_the_status_of_the_process(
    program, status, stderr
):
    (result,) = run(program, num_processes=1)
    assert result.returncode == status
    assert (result.outcome == "succeeded") == (status == 0)
    assert result.stderr_tail.endswith(stderr)
    assert result.stdout == ("bye" if "atexit" in program else "")


def test_scripts_and_modules_see_what_python_would_show_them(tmp_path):
    source = "import sys; print(__name__, sys.argv[1:], sys.modules[__name__].__file__)"
    script = tmp_path / "a_script.py"
    script.write_text(f"import beside\n{source}\n")
    (tmp_path / "beside.py").write_text("")
    for arguments in ((str(script), "a", "-m"), ("-m", "a_script", "a", "-m")):
        (result,) = launch.run_cluster(
            arguments,
            num_processes=1,
            devices_per_process=1,
            timeout_seconds=TIMEOUT_SECONDS,
            cwd=tmp_path,
        )
        assert result.outcome == "succeeded", result.stderr_tail
        assert result.stdout == f"__main__ ['a', '-m'] {script}"


def test_options_of_the_interpreter_are_refused():
    with pytest.raises(ValueError, match="begin with -X, but must begin with -c, -m"):
        launch.run_cluster(
            ("-X", "dev"), num_processes=1, devices_per_process=1, timeout_seconds=1
        )


def test_what_a_child_started_is_ended_too():
    results = run(
        """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        """,
        num_processes=1,
    )
    assert results[0].outcome == "succeeded"
    wait_for_no_leftovers()


def test_an_exception_in_a_callback_ends_all():
    def stop(index, line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("import time; print('x', flush=True); time.sleep(600)", on_line=stop)
    wait_for_no_leftovers()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_parent_takes_its_children_along(tmp_path: pathlib.Path):
    program = textwrap.dedent(
        """
        from orbax_reshard.tools import launch
        launch.run_cluster(
            ("-c", "import time; print('up', flush=True); time.sleep(600)"),
            num_processes=2, devices_per_process=1, timeout_seconds=600,
            on_line=lambda index, line: print(line, index, flush=True))
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=launch.child_environment(1),  # so that it finds the package
    ) as parent:
        assert parent.stdout is not None
        assert {parent.stdout.readline() for _ in range(2)} == {"up 0\n", "up 1\n"}
        parent.kill()
    wait_for_no_leftovers()


def test_a_long_message_arrives_whole():
    program = """
    from orbax_reshard.tools import launch
    launch.emit("x" * 3_000_000)
    launch.emit(None)
    """
    (result,) = run(program, num_processes=1)
    assert result.messages == ("x" * 3_000_000, None)


def test_a_program_started_by_hand_prints_its_messages(monkeypatch, capsys):
    monkeypatch.delenv("ORESH_MESSAGES_FD", raising=False)
    launch.emit({"a": 1})
    assert capsys.readouterr().out == '{"a": 1}\n'


def test_joining_without_a_launcher_says_so(monkeypatch):
    monkeypatch.delenv(launch.COORDINATOR_VARIABLE, raising=False)
    with pytest.raises(launch.ClusterError, match="ORESH_COORDINATOR is not set"):
        launch.initialize_from_environment()


@pytest.mark.parametrize(
    "name", ["num_processes", "devices_per_process", "timeout_seconds"]
)
def test_counts_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0, but must be greater than 0"):
        run("", **{name: 0})


def test_an_interpreter_that_does_not_exist_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(FileNotFoundError):
        run("")


def test_the_check_for_leftovers_can_fail():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as p:
        # Between fork and exec, /proc still shows the parent's own environment.
        deadline = time.monotonic() + 10
        while p.pid not in leftover_processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(AssertionError, match=rf"left behind: \{{{p.pid}: "):
            wait_for_no_leftovers(timeout_seconds=0.1)
        p.kill()
