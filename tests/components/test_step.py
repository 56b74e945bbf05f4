"""A step that a workflow tries again."""

from __future__ import annotations

from pathlib import Path

from tests.components.execution import config_in, execute

PARAMETERS = {"tracking_run": "r"}


def attempt(folder: Path, workflow: str) -> tuple[int, str]:
    """Stage data; exit code and sentence."""
    config = config_in(folder, data={"uri": str(folder / "absent.jsonl")})
    done = execute("stage_data", config, PARAMETERS, folder, ("data",), ("metrics",), {"TANDEM_WORKFLOW": workflow})
    return done.code, done.sentence


def test_a_users_mistake_is_not_made_twice_in_one_workflow(tmp_path: Path) -> None:
    first = attempt(tmp_path, "w1")
    assert first[0] in (64, 65) and "absent.jsonl" in first[1]
    # The file comes, but the same workflow tells the same mistake: its retries are not the user's.
    (tmp_path / "absent.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(400))
    )
    assert attempt(tmp_path, "w1") == first
    assert attempt(tmp_path, "w2")[0] == 0
