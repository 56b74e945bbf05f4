"""Where each thing of a run lies: durable things in its store, the rest in its scratch folder."""

from __future__ import annotations

from pathlib import Path

from components.storage.store import Store, as_uri, open_store
from configs.run import RunConfig


class RunLayout:
    """Places of one run.

    `store` outlives the machine: `data/`, `checkpoints/step-000050/`, `export/`, `steps/<step>.json`,
    `manifest.json`, `report.html`. `scratch` is local and may be lost with the machine: `events.jsonl`, `logs/`,
    `redis/`, `weights/`. Pods share no scratch folder: what one of them leaves for the next goes through the store.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.uri = f"{as_uri(config.storage.root).rstrip('/')}/{config.name}"
        self.scratch = Path(config.storage.scratch).absolute() / config.name

    @property
    def store(self) -> Store:
        """The run's durable store."""
        return open_store(self.uri, self.config.storage)

    @property
    def events(self) -> Path:
        """Every event of the loop, one JSON object a line, in order of arrival."""
        return self.scratch / "events.jsonl"

    @property
    def scratch_is_shared(self) -> bool:
        """Whether all parts of the run see the same scratch folder; pods do not."""
        return self.config.loop.roles == "processes"

    def fetch_events(self) -> None:
        """Bring the events that an earlier pod of the run left in the store."""
        if not self.scratch_is_shared and not self.events.exists() and self.store.exists("events.jsonl"):
            self.scratch.mkdir(parents=True, exist_ok=True)
            self.store.download("events.jsonl", self.events)

    def save_events(self) -> None:
        """Leave the events for the pods that come after this one."""
        if not self.scratch_is_shared and self.events.exists():
            self.store.upload(self.events, "events.jsonl")

    @property
    def logs(self) -> Path:
        """Folder with one log a process."""
        return self.scratch / "logs"

    @property
    def weights(self) -> Path:
        """Folder of the weights store."""
        return self.scratch / "weights"

    @property
    def redis(self) -> Path:
        """Folder of the embedded Redis: socket, append-only file."""
        return self.scratch / "redis"
