import json
import platform
from pathlib import Path

import pytest

from components.tracking.manifest import build_manifest, manifest_bytes, manifest_digest, manifest_tags
from configs.run import RunConfig


def test_the_manifest_is_canonical_json_with_one_digest(tmp_path: Path) -> None:
    ir = tmp_path / "pipeline.yaml"
    ir.write_text("pipelineInfo: {}\n")
    manifest = build_manifest(RunConfig(), ir=ir, images={"control": "example/control@sha256:0"})
    again = build_manifest(RunConfig(), ir=ir, images={"control": "example/control@sha256:0"})
    assert manifest_bytes(manifest) == manifest_bytes(again)
    assert json.loads(manifest_bytes(manifest)) == manifest
    assert all(manifest[part]["sha256"] for part in ("lock", "stack", "config"))
    assert manifest["python"] == platform.python_version()
    assert manifest["packages"]["mlflow"] and manifest["packages"]["deep_ep"] is None
    assert manifest_tags(manifest)["build.manifest_sha256"] == manifest_digest(manifest)


def test_another_pipeline_or_configuration_is_another_build(tmp_path: Path) -> None:
    ir = tmp_path / "pipeline.yaml"
    ir.write_text("one")
    first = manifest_digest(build_manifest(RunConfig(), ir=ir))
    assert manifest_digest(build_manifest(RunConfig(seed=1), ir=ir)) != first
    ir.write_text("two")
    assert manifest_digest(build_manifest(RunConfig(), ir=ir)) != first


def test_the_efa_installer_names_what_it_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "efa_installed_packages"
    listed.write_text("# EFA installer version: 1.51.0\nlibfabric1-aws_2.7.0amzn1.0\nlibnccl-ofi_1.22.0-1\nefa_3.3.1\n")
    monkeypatch.setattr("components.tracking.manifest._EFA_PACKAGES", listed)
    transport = build_manifest(RunConfig())["transport"]
    assert transport["efa_installer"] == "1.51.0" and transport["aws_ofi_nccl"] == "1.22.0"
