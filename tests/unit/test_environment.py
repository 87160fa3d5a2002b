"""An environment over another: the one below is seen, and what lies above wins."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))

import environment
from environment import Environment


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A ready environment that holds two modules, one of them by a path file as an editable
    package's is.
    """
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    made = Environment(".venv", ())
    venv.create(tmp_path / ".venv")
    (site_packages(made) / "both.py").write_text("where = 'below'")
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "edited.py").write_text("where = 'in place'")
    (site_packages(made) / "edited.pth").write_text(str(tmp_path / "checkout"))
    (tmp_path / ".venv" / "ready").write_text(made._digest())
    return made


def site_packages(made: Environment) -> Path:
    (found,) = (environment.ROOT / made.folder).glob("lib/*/site-packages")
    return found


def told(made: Environment, module: str) -> str:
    command = [str(made.python), "-c", f"import {module}; print({module}.where)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_what_lies_below_is_seen(below: Environment) -> None:
    over = Environment(".venv-over", (), over=below)
    assert over.ensure() == over.python
    assert (told(over, "both"), told(over, "edited")) == ("below", "in place")
    (site_packages(over) / "both.py").write_text("where = 'over'")
    assert (told(over, "both"), told(below, "both")) == ("over", "below")


def test_what_was_asked_for_before_is_gone(below: Environment, tmp_path: Path) -> None:
    over = Environment(".venv-over", (), over=below)
    over.ensure()
    (site_packages(over) / "both.py").write_text("where = 'over'")
    over.ensure()
    assert told(over, "both") == "over"  # nothing has changed, so nothing is made again
    (tmp_path / "pyproject.toml").write_text("# another package")
    (tmp_path / ".venv" / "ready").write_text(below._digest())
    over.ensure()
    assert told(over, "both") == "below"


def test_a_failure_says_what_the_disk_has_left(
    below: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"could not install into \.venv-over(?s:.*) GB free"):
        Environment(".venv-over", ("no-index",), over=below).ensure()  # below has no pip
    assert "No module named pip" in capfd.readouterr().err
    assert not (environment.ROOT / ".venv-over" / "ready").exists()


def test_what_was_half_installed_is_not_ready_when_the_old_is_asked_for_again(
    below: Environment,
) -> None:
    with pytest.raises(SystemExit):
        Environment(".venv", ("no-index",)).ensure()  # it has no pip
    with pytest.raises(SystemExit):
        below.ensure()
