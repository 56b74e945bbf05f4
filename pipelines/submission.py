"""What is sent to a cluster: a run's configuration made fit for pods, the images, and a name that finds it again.

A *run* is named by its configuration and lives in the store; an *execution* is one attempt of the pipeline at it. The
first execution carries the run's name, a retry the same with `-r1`, `-r2`, … Submitting a name again with the same
configuration finds the execution that is there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.document import validated
from configs.failure import BadConfig
from configs.run import RunConfig
from configs.stack import Images, load_stack
from pipelines.execution import resolve
from pipelines.targets.target import ExecutionState

BUILT = Path("images/built.json")
SCRATCH = "/scratch"
BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
SCHEDULED_NAME_LIMIT = 24
"""Characters a schedule's name may have: its runs are called after it and the time, and a run's name has at most 40."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@dataclass(frozen=True)
class Submission:
    """A run, ready to be sent.

    Attributes:
        config: The resolved configuration.
        images: References that go into the pipeline.
    """

    config: RunConfig
    images: Images

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.name

    @property
    def digest(self) -> str:
        """Twelve hex digits that two submissions share when they ask for the same."""
        return digest_of(self.config)

    @property
    def pipeline_root(self) -> str:
        """Where the pipeline's own artifacts go."""
        return f"{self.config.storage.root.rstrip('/')}/artifacts"

    def arguments(self, name: str | None = None) -> dict[str, Any]:
        """The pipeline's arguments; `name` stands in for the run's name in a schedule, where it is not known yet."""
        text = self.config.to_json()
        if name is not None:
            text = json.dumps({**json.loads(text), "name": name})
        return {"config": text, "checkpoint": self.config.model.checkpoint}


def prepare(run_file: Path, overrides: tuple[str, ...], name: str | None, images_file: Path | None) -> Submission:
    """Resolve a run file for pods, which share no disk with this machine and none with each other.

    Args:
        run_file: As for `tandem run`.
        overrides: `key=value` settings.
        name: Name of the run; None takes the file's and the time.
        images_file: What the image build wrote; None takes images/built.json if it is there.

    Raises:
        BadConfig: something in it would not work on a cluster.
    """
    # Validation needs a bucket and the pods' scratch folder in place from the start.
    given = load_storage_root(run_file, overrides)
    if not given.startswith("s3://"):
        raise BadConfig(
            f"storage.root is '{given}', but the pods of a run share no disk; give a bucket: -s storage.root=s3://BUCKET/runs"
        )
    if mistake := bucket_mistake("storage.root", given):
        raise BadConfig(mistake)
    settings = (*overrides, "loop.roles=kubernetes", f"storage.scratch={SCRATCH}")
    config = resolve(run_file, settings, name, Path("runs"))
    images = find_images(config, images_file)
    values = config.model_dump(mode="json")
    values["kubernetes"]["images"] = images.model_dump()
    config = validated(RunConfig, values, str(run_file))
    for mistake in unreachable(config):
        raise BadConfig(mistake)
    return Submission(config, images)


def prepare_schedule(
    run_file: Path, overrides: tuple[str, ...], name: str | None, images_file: Path | None
) -> Submission:
    """As `prepare`, for runs that are named after a schedule and the time each is started.

    Raises:
        BadConfig: as `prepare`, or the name leaves no room for the time.
    """
    from configs.run import load_run

    name = name or load_run(run_file, overrides).name
    if len(name) > SCHEDULED_NAME_LIMIT:
        raise BadConfig(
            f"schedule name '{name}' has {len(name)} characters, and its runs add the time; give --name with at most"
            f" {SCHEDULED_NAME_LIMIT}"
        )
    return prepare(run_file, overrides, name, images_file)


def load_storage_root(run_file: Path, overrides: tuple[str, ...]) -> str:
    """What the run file and the overrides say of `storage.root`."""
    from configs.run import load_run

    return load_run(run_file, overrides).storage.root


def find_images(config: RunConfig, images_file: Path | None) -> Images:
    """The images of the pods: `--images`, else the configuration's, else images/built.json, else the stack's.

    Raises:
        BadConfig: the file cannot be read, or only names without a registry are known, which a node would look for
            in a public one.
    """
    if images_file is None and config.kubernetes.images is not None:
        return config.kubernetes.images
    if built := read_images(images_file):
        return built
    images = load_stack(config.stack).images
    host = images.control.partition("/")[0]
    if "." not in host and ":" not in host and host != "localhost":
        raise BadConfig(
            f"no images to run: {BUILT} is missing and stack '{config.stack}' names none in a registry; build them with"
            " `make images`, or give --images FILE"
        )
    return images


def read_images(images_file: Path | None) -> Images | None:
    """The images in a file, or in images/built.json; None if no file was named and that one is not there.

    Raises:
        BadConfig: the named file is missing, or what is there is no list of images.
    """
    file = images_file or BUILT
    if not file.exists():
        if images_file is not None:
            raise BadConfig(f"--images {images_file}: no such file; `make images` writes {BUILT}")
        return None
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise BadConfig(f"{file}: is no list of images; write it again with `make images`")
    return validated(Images, values, str(file))


def bucket_mistake(key: str, place: str) -> str:
    """What is wrong with the bucket of an `s3://` place, in one sentence; empty if nothing is, or it is elsewhere."""
    bucket = place.removeprefix("s3://").partition("/")[0]
    if not place.startswith("s3://") or (re.fullmatch(BUCKET, bucket) and ".." not in bucket):
        return ""
    if not bucket:
        return f"{key} is '{place}', which names no bucket; give s3://BUCKET/PREFIX"
    return (
        f"{key} is '{place}', but no bucket is called '{bucket}': S3 takes 3 to 63 lower-case letters, digits, dots and"
        " dashes, with a letter or digit at both ends; give s3://BUCKET/PREFIX"
    )


def unreachable(config: RunConfig) -> list[str]:
    """Settings that point at this machine, which pods cannot reach, or at no bucket; one sentence each."""
    found = []
    for key, place in (("data.uri", config.data.uri), ("model.checkpoint", config.model.checkpoint)):
        if mistake := bucket_mistake(key, place or ""):
            found.append(mistake)
        if place and not place.startswith(("s3://", "example:")):
            found.append(
                f"{key} is {place}, a place on this machine that pods cannot read; copy it to s3:// and name that"
            )
    addresses = {
        "storage.endpoint_url": config.storage.endpoint_url,
        "tracking.uri": config.tracking.uri,
        "loop.redis_url": config.loop.redis_url,
        "reward.url": config.reward.url,
    }
    for key, address in addresses.items():
        if address and urlsplit(address).hostname in LOCAL_HOSTS:
            found.append(
                f"{key} is {address}, which in a pod means the pod itself; give an address that the cluster reaches"
            )
    return found


def digest_of(config: RunConfig) -> str:
    """Twelve hex digits of a configuration."""
    return hashlib.sha256(config.to_json().encode()).hexdigest()[:12]


def same_or_refuse(submission: Submission, found: ExecutionState) -> None:
    """Accept an execution that has the submission's name only if it has its configuration too.

    Raises:
        BadConfig: it has another; the sentence names the fields.
    """
    if found.digest == submission.digest:
        return
    differing = differences(found.config, submission.config.to_json())
    words = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
    raise BadConfig(
        f"a run named '{submission.name}' exists with another configuration ({words or 'not readable'}); choose another --name"
    )


def differences(first: str, second: str) -> list[str]:
    """The fields in which two configurations differ, as `train.steps 50, here 60`."""
    try:
        pair = [dict(_leaves(json.loads(text))) for text in (first, second)]
    except ValueError:
        return []
    keys = sorted({*pair[0], *pair[1]})
    return [
        f"{key} {pair[0].get(key)}, here {pair[1].get(key)}" for key in keys if pair[0].get(key) != pair[1].get(key)
    ]


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def retry_name(run: str, taken: list[str]) -> str:
    """Name of a run's next execution: `run-r1`, `run-r2`, …"""
    numbers = [int(tail) for name in taken if (tail := name.removeprefix(f"{run}-r")) != name and tail.isdigit()]
    return f"{run}-r{max(numbers, default=0) + 1}"
