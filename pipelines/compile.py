"""Compiles the pipeline to KFP's intermediate representation (IR), with the images of one stack.

`python -m pipelines.compile` writes the committed one again, and the Argo Workflow it is translated to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from configs.failure import BadConfig
from configs.stack import Images, Stack, load_stack

COMPILED = Path(__file__).parent / "compiled"
POST_TRAINING = COMPILED / "post_training.yaml"
POST_TRAINING_ARGO = COMPILED / "post_training.argo.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's reader where there is one: ten times faster, and an IR has a thousand lines."""


def compile_pipeline(stack: Stack, target: Path, images: Images | None = None) -> None:
    """Write the IR of the post-training pipeline.

    Components name the kind of their image (`control`, `train`); here the stack's reference takes its place, so one
    definition serves every stack.

    Args:
        stack: Whose images the tasks run in, unless others are given.
        target: YAML file to write; its folder is made.
        images: References that take the place of the stack's, such as those of images just built.
    """
    from kfp.compiler import Compiler

    from pipelines.post_training import post_training

    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft.yaml"
        Compiler().compile(post_training, str(draft))
        text = draft.read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    _put_images(documents[0], images or stack.images)
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(header + yaml.safe_dump_all(documents, sort_keys=True, width=120), encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"{target}: cannot be written ({error.strerror}); name another file") from None


def _put_images(ir: dict[str, Any], images: Images) -> None:
    references = images.model_dump()
    for name, executor in ir["deploymentSpec"]["executors"].items():
        kind = executor["container"]["image"]
        if kind not in references:
            raise BadConfig(
                f"{name}: image kind '{kind}' is unknown; name one of {', '.join(references)} in component.py"
            )
        executor["container"]["image"] = references[kind]


def read_ir(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a compiled pipeline: the IR, and platform settings where there are any.

    Raises:
        BadConfig: the file is missing or is no compiled pipeline.
    """
    try:
        documents = list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=LOADER))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        documents = []
    if not documents or not isinstance(documents[0], dict) or "pipelineInfo" not in documents[0]:
        raise BadConfig(f"{path}: is no compiled pipeline; write one with `tandem compile`")
    return documents


def same_ir(first: Path, second: Path) -> bool:
    """Whether two compiled pipelines are equal but for the version of the SDK that compiled them."""
    pair = [read_ir(first), read_ir(second)]
    for documents in pair:
        documents[0].pop("sdkVersion", None)
    return pair[0] == pair[1]


if __name__ == "__main__":
    from pipelines.targets.argo.translation import write_argo

    compile_pipeline(load_stack("cpu"), POST_TRAINING)
    write_argo(POST_TRAINING, POST_TRAINING_ARGO)
    print(POST_TRAINING, POST_TRAINING_ARGO, sep="\n")
