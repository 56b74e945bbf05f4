"""JSON schemas of the YAML files, for editors: `python -m configs.schema` writes them again."""

from __future__ import annotations

import json
from pathlib import Path

from configs.document import Document
from configs.hardware import HardwareProfile
from configs.run import RunConfig
from configs.stack import Stack

SCHEMAS = Path(__file__).parent / "schemas"
MODELS: dict[str, type[Document]] = {"run": RunConfig, "hardware": HardwareProfile, "stack": Stack}


def write_schemas(folder: Path = SCHEMAS) -> list[Path]:
    """Write <model>.schema.json for every kind of YAML file.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, model in MODELS.items():
        path = folder / f"{name}.schema.json"
        path.write_text(json.dumps(model.model_json_schema(), indent=2) + "\n", encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_schemas():
        print(path)
