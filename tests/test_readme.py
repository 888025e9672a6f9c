"""What the README says is what is done: its commands, and its program."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from orbax_reshard.tools import launch

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# The program compiles a few small exchanges; this is for a busy machine.
TIMEOUT_SECONDS = 120


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_ci_runs_the_test_command_of_the_readme():
    _, test_command = blocks("sh")
    command = test_command.strip().split(" && ")[-1].removeprefix(".venv/bin/")
    assert command == "python -m pytest"
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert lines.count(command) == 1


def test_the_two_commands_install_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = blocks("sh")
    assert len(commands) == 2
    for command in commands:
        assert command.count("\n") == 1
        (extra,) = re.findall(r"'\.\[(\w+)\]'", command)
        assert extra in project["optional-dependencies"]
    assert commands[0].strip().endswith(".venv/bin/orbax-reshard demo")
    assert project["scripts"]["orbax-reshard"] == "orbax_reshard.tools.cli:main"


@pytest.mark.usefixtures("no_leftovers")
def test_the_program_runs_and_reads_once(tmp_path):
    save, restore = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", save + restore],
        capture_output=True,
        text=True,
        env=launch.child_environment(8) | {"TMPDIR": str(tmp_path)},
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    amplification = float(done.stdout.splitlines()[-1])
    assert 0.9 < amplification < 1.1
