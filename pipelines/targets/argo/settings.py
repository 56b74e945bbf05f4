"""What kfp-kubernetes can ask of a pod, as models that refuse every other key.

Field names follow KFP's kubernetes_executor_config.proto (kfp-kubernetes 2.17) in JSON spelling.
"""

from __future__ import annotations

from typing import Literal

from pipelines.targets.argo.ir import Node, ParameterSource, TaskOutputParameter


class KeyToEnvironment(Node):
    secret_key: str = ""
    config_map_key: str = ""
    env_var: str


class SecretAsEnv(Node):
    secret_name: str = ""
    secret_name_parameter: ParameterSource | None = None
    key_to_env: list[KeyToEnvironment] = []
    optional: bool | None = None


class SecretAsVolume(Node):
    secret_name: str = ""
    secret_name_parameter: ParameterSource | None = None
    mount_path: str
    optional: bool = False


class ConfigMapAsEnv(Node):
    config_map_name: str = ""
    config_map_name_parameter: ParameterSource | None = None
    key_to_env: list[KeyToEnvironment] = []
    optional: bool | None = None


class ConfigMapAsVolume(Node):
    config_map_name: str = ""
    config_map_name_parameter: ParameterSource | None = None
    mount_path: str
    optional: bool = False


class PvcMount(Node):
    constant: str = ""
    task_output_parameter: TaskOutputParameter | None = None
    component_input_parameter: str | None = None
    pvc_name_parameter: ParameterSource | None = None
    mount_path: str
    sub_path: str = ""


class EmptyDirMount(Node):
    volume_name: str
    mount_path: str
    medium: str = ""
    size_limit: str = ""


class PodMetadata(Node):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class EphemeralVolume(Node):
    volume_name: str
    mount_path: str
    access_modes: list[str] = []
    size: str
    default_storage_class: bool = False
    storage_class_name: str = ""
    metadata: PodMetadata = PodMetadata()


class NodeSelector(Node):
    labels: dict[str, str] = {}
    node_selector_json: ParameterSource | None = None


class Toleration(Node):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None
    toleration_json: ParameterSource | None = None


class SelectorRequirement(Node):
    key: str
    operator: str
    values: list[str] = []


class NodeAffinityTerm(Node):
    match_expressions: list[SelectorRequirement] = []
    match_fields: list[SelectorRequirement] = []
    weight: int | None = None
    node_affinity_json: ParameterSource | None = None


class ImagePullSecret(Node):
    secret_name: str = ""
    secret_name_parameter: ParameterSource | None = None


class FieldPathAsEnv(Node):
    name: str
    field_path: str


class SecurityContext(Node):
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None


class KubernetesSettings(Node):
    """What kfp-kubernetes asks for one executor."""

    secret_as_env: list[SecretAsEnv] = []
    secret_as_volume: list[SecretAsVolume] = []
    config_map_as_env: list[ConfigMapAsEnv] = []
    config_map_as_volume: list[ConfigMapAsVolume] = []
    field_path_as_env: list[FieldPathAsEnv] = []
    pvc_mount: list[PvcMount] = []
    empty_dir_mounts: list[EmptyDirMount] = []
    generic_ephemeral_volume: list[EphemeralVolume] = []
    node_selector: NodeSelector = NodeSelector()
    tolerations: list[Toleration] = []
    node_affinity: list[NodeAffinityTerm] = []
    pod_metadata: PodMetadata = PodMetadata()
    image_pull_secret: list[ImagePullSecret] = []
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    active_deadline_seconds: int = 0
    security_context: SecurityContext | None = None


class PlatformDeployment(Node):
    executors: dict[str, KubernetesSettings] = {}


class PipelineConfig(Node):
    resource_ttl_on_completion: int = 0
    resource_ttl_on_success: int = 0
    resource_ttl_on_failure: int = 0
    active_deadline_seconds: int = 0


class Platform(Node):
    platform: str = ""
    deployment_spec: PlatformDeployment = PlatformDeployment()
    pipeline_config: PipelineConfig = PipelineConfig()


class Platforms(Node):
    kubernetes: Platform = Platform()


class PlatformDocument(Node):
    platforms: Platforms = Platforms()
