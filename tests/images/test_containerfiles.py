"""The Containerfiles hold what they promise, as far as that shows without building them."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from configs.stack import load_stack
from images.recipe import KINDS, recipe
from tests.images.containerfile import VARIABLE, Containerfile, read

IMAGES = Path(__file__).resolve().parents[2] / "images"
TARGETS = {"Containerfile": KINDS, "gpu.Containerfile": ("train", "rollout")}
FROM_THE_BASE = {"CUDA_VERSION", "PATH"}
CONTEXTS = {"uv"}
LABELS = (
    "org.opencontainers.image.title",
    "org.opencontainers.image.version",
    "org.opencontainers.image.revision",
    "tandem.stack",
    "tandem.stack.sha256",
    "tandem.lock.sha256",
    "tandem.inputs.sha256",
)


@pytest.fixture(params=TARGETS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def parsed(name: str, tmp_path: Path) -> Containerfile:
    return read(IMAGES / name, tmp_path)


def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, "--no-color", IMAGES / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_stage_starts_from_the_base_or_an_earlier_stage(parsed: Containerfile) -> None:
    earlier: set[str] = set()
    for stage in parsed.stages.values():
        assert stage.parent in earlier | {"${BASE}"}, stage.name
        assert stage.sources <= earlier | CONTEXTS, stage.name
        earlier.add(stage.name)
    assert parsed.arguments == {"BASE": None}


def test_no_stage_is_left_over(name: str, parsed: Containerfile) -> None:
    assert set().union(*(parsed.reachable(target) for target in TARGETS[name])) == set(parsed.stages)


def test_variables_are_defined_and_arguments_are_used(parsed: Containerfile) -> None:
    for stage in parsed.stages.values():
        inherited = {
            pair.split("=")[0]
            for ancestor in parsed.ancestors(stage.name)
            for value in ancestor.values("ENV")
            for pair in re.findall(r"\w+=", value)
        }
        in_shell = {name for value in stage.values("RUN") for name in re.findall(r"\b(\w+)=", value)}
        used = {match[0] or match[1] for _, value in stage.instructions for match in VARIABLE.findall(value)}
        assert used <= set(stage.arguments) | inherited | in_shell | FROM_THE_BASE, stage.name
        # uv and git read the certificates and the architectures from the environment.
        unused = set(stage.arguments) - used - {"SSL_CERT_FILE", "TORCH_CUDA_ARCH_LIST"}
        assert not unused, stage.name


@pytest.mark.parametrize(
    ("file", "kind", "stack"),
    [*(("Containerfile", kind, "cpu") for kind in KINDS), *(("gpu.Containerfile", k, "deepep-efa") for k in KINDS[1:])],
)
def test_the_build_gives_every_argument_that_has_no_default(file: str, kind: str, stack: str, tmp_path: Path) -> None:
    parsed = read(IMAGES / file, tmp_path)
    wanted = recipe(kind, load_stack(stack), "base", "cuda-base")
    assert wanted.containerfile == f"images/{file}"
    context = IMAGES.parent
    given = {**wanted.arguments, **wanted.labels(context, "0"), "SSL_CERT_FILE": ""}
    needed = {
        argument
        for stage in parsed.reachable(kind)
        for argument, default in parsed.stages[stage].arguments.items()
        if default is None
    }
    assert needed | {"BASE"} == set(given)
    assert all(given[argument] for argument in needed - {"SSL_CERT_FILE", "REVISION"})


def test_images_run_without_rights_and_say_what_they_are(name: str, parsed: Containerfile) -> None:
    for target in TARGETS[name]:
        assert parsed.stages[target].values("USER")[-1] == "10001:10001"
        labels = " ".join(value for stage in parsed.ancestors(target) for value in stage.values("LABEL"))
        for label in LABELS:
            assert re.search(rf'{re.escape(label)}="?[^"]', labels), (target, label)
        assert f'title="tandem {target}"' in " ".join(parsed.stages[target].values("LABEL"))


def test_nothing_comes_in_unpinned(parsed: Containerfile) -> None:
    for stage in parsed.stages.values():
        assert not stage.values("ADD"), stage.name
        for command in stage.values("RUN"):
            assert "latest" not in command
            if "pip sync" in command or "--requirement" in command:
                assert "--require-hashes" in command
            if "curl --" in command:
                assert "gpg --batch --status-fd 1 --verify" in command and "VALIDSIG" in command
            if "git clone" in command:
                assert re.search(r'--branch "v\$\{\w+\}"', command)
            if "fetch" in command:
                assert '"${DEEP_EP_COMMIT}"' in command


def test_final_images_hold_no_build_tools(name: str, parsed: Containerfile) -> None:
    for target in TARGETS[name]:
        line = parsed.ancestors(target)
        commands = [command for stage in line for command in stage.values("RUN")]
        assert not any(re.search(r"apt-get install[^&]* (git|make)\b", command) for command in commands)
        assert not any("uv" in value.split() for stage in line for value in stage.values("COPY"))


def test_versions_live_in_the_stack_alone() -> None:
    text = (IMAGES / "gpu.Containerfile").read_text()
    stack = load_stack("deepep-efa")
    for field in ("gdrcopy", "efa_installer", "nccl", "torch", "transformers", "sglang", "deep_ep", "deep_ep_commit"):
        assert getattr(stack, field) not in text, field


def test_no_registry_is_named() -> None:
    for path in IMAGES.rglob("*"):
        if path.suffix in (".py", ".Containerfile", "") and path.is_file():
            assert not re.search(r"(docker|ghcr|quay|gcr|nvcr|\.ecr\.\S+)\.(io|com)", path.read_text()), path
