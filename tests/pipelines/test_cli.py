"""What a user types, and the one sentence a mistake gets."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
import yaml

from components.tracking.server import Server
from configs.run import RUNS
from tests.pipelines.command import tandem

QUICKSTART = str(RUNS / "quickstart.yaml")


def test_help_names_every_command(tmp_path: Path) -> None:
    done = tandem(tmp_path, "--help")
    assert done.code == 0
    local = ("run", "compile", "audit", "report", "bench", "data", "doctor", "mlflow", "diff")
    remote = (
        "submit",
        "schedule",
        "schedules",
        "unschedule",
        "executions",
        "status",
        "logs",
        "cancel",
        "retry",
        "install",
    )
    for command in (*local, *remote):
        assert f"\n  {command} " in done.out


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    import subprocess
    import sys

    heavy = ("torch", "kfp", "mlflow", "pydantic", "kubernetes")
    probe = f"import sys; import pipelines.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dry_run_prints_the_resolved_configuration_and_leaves_nothing(tmp_path: Path) -> None:
    done = tandem(tmp_path, "run", QUICKSTART, "-s", "train.steps=50", "--name", "mine", "--dry-run")
    assert done.code == 0
    resolved = yaml.safe_load(done.out)
    assert resolved["train"]["steps"] == 50
    assert resolved["name"] == "mine"
    assert resolved["tracking"]["registered_model"] == "tandem-add2r"
    assert resolved["storage"]["root"] == str(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 64, "give a run file"),
        (["run", "absent.yaml"], 64, "absent.yaml: no such file"),
        (["run", QUICKSTART, "-s", "train.stepz=5"], 64, "unknown key 'train.stepz'"),
        (["run", QUICKSTART, "-s", "train.steps=many"], 64, "'train.steps' is 'many'"),
        (["run", QUICKSTART, "-s", "rollout.group_size=1"], 64, "every advantage would be 0"),
        (["run", QUICKSTART, "-s", "train.minibatches=5"], 64, "not divisible"),
        (["run", QUICKSTART, "--name", "Not A Name"], 64, "'name' is 'Not A Name'"),
        (["run", QUICKSTART, "--resume", "x"], 64, "one of the two"),
        (["run", "--resume", "no-such-run"], 64, "holds no run 'no-such-run'"),
        (["run", "--resume", "x", "-s", "seed=1"], 64, "leave out -s and --name"),
        (["audit", "no-such-run"], 64, "holds no run"),
        (["report", "no-such-run"], 64, "holds no run"),
        (["mlflow"], 64, "holds no MLflow store"),
        (["compile", "--stack", "nothing"], 64, "stack 'nothing' is unknown"),
        (["data", "add2r", "x.txt"], 64, "x.txt"),
        (["data", "add2r", "x.jsonl", "--rows", "20000"], 64, "10"),
        (["no-such-command"], 64, "No such command"),
        (["mlflow", "--port", "99999"], 64, "99999"),
        (["bench", "loop", "--seeds", "a,b"], 64, "no list of numbers"),
        (["compile", "-o", "/proc/nope/x.yaml"], 64, "cannot be written"),
        (["run", QUICKSTART, "--json", "/proc/nope/x.json"], 64, "--json"),
        (["run", QUICKSTART, "--dry-run", "-s", "stack=nope"], 64, "stack 'nope' is unknown"),
        (["run", QUICKSTART, "-s", "tracking.uri=ftp://x/y"], 64, "no http address"),
        (["run", QUICKSTART, "-s", "loop.redis_url=redis://:hunter2@h:1/0"], 64, "REDIS_PASSWORD"),
        (["run", QUICKSTART, "-s", "model.hidden_size=10"], 64, "multiple of 8"),
        (["run", QUICKSTART, "-s", "train.learning_rate=.inf"], 64, "'train.learning_rate'"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = tandem(tmp_path, *arguments)
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("tandem: ") or "Usage:" in done.err
    if done.err.startswith("tandem: "):
        assert done.err.count("\n") == 1


def test_a_live_runs_name_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "busy"
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = tandem(tmp_path, "run", QUICKSTART, "--name", "busy")
    assert done.code == 64
    assert "a run named 'busy' is live" in done.err


def test_an_ended_runs_name_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("kept")
    (folder / "steps").mkdir()
    marker = {"step": "stage_data", "status": "done", "pid": 1, "host": "h", "started": 1.0}
    (folder / "steps" / "stage_data.json").write_text(json.dumps(marker))
    done = tandem(tmp_path, "run", QUICKSTART, "--name", "old")
    assert done.code == 64
    assert "--resume old" in done.err
    assert (folder / "run.json").read_text() == "kept"


def test_an_unwritable_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    done = tandem(tmp_path, "run", QUICKSTART)
    assert done.code == 64
    assert "cannot be written" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=', "line 2"),
        (b'{"prompt": "1+1=", "answer": "2"}\n\xff\xfe\n', "UTF-8"),
    ],
    ids=["truncated", "not UTF-8"],
)
def test_bad_data_ends_a_run_in_one_sentence(tmp_path: Path, mlflow_server: Server, content: bytes, words: str) -> None:
    """Through the whole door: the CLI, the compiled pipeline, the step, and back."""
    (tmp_path / "x.jsonl").write_bytes(content)
    done = tandem(
        tmp_path,
        "run",
        QUICKSTART,
        "-s",
        "data.uri=x.jsonl",
        "--plain",
        "--name",
        "bad",
        MLFLOW_TRACKING_URI=mlflow_server.uri,
    )
    assert done.code == 65
    assert done.err.startswith("tandem: stage_data: ")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert json.loads((tmp_path / "runs" / "bad" / "steps" / "release.json").read_text())["status"] == "done"


def test_a_mistake_does_not_take_the_name(tmp_path: Path, mlflow_server: Server) -> None:
    """And words in brackets are words: no display may read them as its own language."""
    line = b'{"id": "[/a]", "prompt": "1", "answer": "1"}\n'
    (tmp_path / "x.jsonl").write_bytes(line * 2)
    for _ in range(2):
        done = tandem(
            tmp_path, "run", QUICKSTART, "-s", "data.uri=x.jsonl", "--plain", "--name", "again",
            MLFLOW_TRACKING_URI=mlflow_server.uri,
        )  # fmt: skip
        assert done.code == 65
        assert "[/a]" in done.err
        assert "[/a]" in done.out


def test_data_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        assert tandem(tmp_path, "data", "sort8", name, "--rows", "50").code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 50


def test_compile_check_notices_a_stale_file(tmp_path: Path) -> None:
    assert tandem(tmp_path, "compile", "-o", "p.yaml").code == 0
    assert tandem(tmp_path, "compile", "-o", "p.yaml", "--check").code == 0
    text = (tmp_path / "p.yaml").read_text()
    (tmp_path / "p.yaml").write_text(text.replace("components.rl_loop.main", "components.other.main"))
    done = tandem(tmp_path, "compile", "-o", "p.yaml", "--check")
    assert done.code == 64
    assert "stale" in done.err


def test_doctor_finds_this_machine_good(tmp_path: Path) -> None:
    done = tandem(tmp_path, "doctor")
    assert done.code == 0, done.err
    assert "redis-server" in done.out


def test_an_interrupt_is_no_defect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines import cli

    def interrupted(arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.tandem, "invoke", interrupted)
    monkeypatch.setattr("sys.argv", ["tandem", "doctor"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 75
    assert "Traceback" not in capsys.readouterr().err
