"""The pod of one task: an Argo container template with everything the IR and kfp-kubernetes ask for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from configs.failure import BadConfig
from pipelines.targets.argo.expression import given, guarded, text
from pipelines.targets.argo.ir import Component, Container, ParameterSource, Resources, RetryPolicy
from pipelines.targets.argo.settings import KubernetesSettings, NodeAffinityTerm

LAUNCHER_VOLUME = "tandem-launcher"
LAUNCHER_MOUNT = "/tandem-launcher"
SCRATCH_VOLUME = "tandem-s3"
RESERVED_VOLUMES = (LAUNCHER_VOLUME, SCRATCH_VOLUME)
OUTPUTS = "/tmp/tandem/outputs"
"""Where the launcher leaves each output's JSON text for Argo."""


@dataclass(frozen=True)
class Pod:
    """One container of the IR, with everything that says how its pod is to be.

    Attributes:
        name: Of the template.
        folder: URI of the folder for the artifacts of this run.
        settings: What kfp-kubernetes asks for.
        pull_policy: Image pull policy unless the pipeline asks for another.
        where: File and task, for messages.
    """

    name: str
    folder: str
    component: Component
    container: Container
    settings: KubernetesSettings
    retry: RetryPolicy | None
    pull_policy: str
    where: str

    def template(self) -> dict[str, Any]:
        """The Argo template that runs it.

        Raises:
            BadConfig: it asks for something Argo cannot do.
        """
        outputs, settings = self.component.output_definitions, self.settings
        listed = [key for key, artifact in outputs.artifacts.items() if artifact.is_artifact_list]
        if listed:
            raise BadConfig(
                f"{self.where}: output '{listed[0]}' is a list of artifacts ('isArtifactList'), which is not translated to"
                " Argo; write one artifact a task, and collect them with dsl.Collected"
            )
        volumes, mounts = _volumes(settings, self.where)
        names = (*outputs.parameters, *outputs.artifacts)
        template: dict[str, Any] = {
            "name": self.name,
            "inputs": _filled({"parameters": input_parameters(self.component)}),
            "outputs": _filled(
                {"parameters": [{"name": key, "valueFrom": {"path": f"{OUTPUTS}/{key}"}} for key in names]}
            ),
            "container": self._main(mounts),
            "volumes": volumes,
            "retryStrategy": retry_strategy(self.retry, self.where) if self.retry else {},
            "activeDeadlineSeconds": settings.active_deadline_seconds,
            "metadata": _filled(
                {"labels": settings.pod_metadata.labels, "annotations": settings.pod_metadata.annotations}
            ),
            **_placement(settings, self.where),
        }
        return _filled(template)

    def _main(self, mounts: list[dict[str, Any]]) -> dict[str, Any]:
        """The container: the launcher, told of the task by its environment and of the inputs by its arguments."""
        inputs, outputs = self.component.input_definitions, self.component.output_definitions
        place = [{"name": "TANDEM_ARTIFACTS", "value": f"{self.folder}/{self.name}"}] if outputs.artifacts else []
        s3 = [{"name": SCRATCH_VOLUME, "mountPath": "/s3"}] if inputs.artifacts or outputs.artifacts else []
        container: dict[str, Any] = {
            "image": _image(self.container.image, self.where),
            "imagePullPolicy": self.settings.image_pull_policy or self.pull_policy,
            "command": ["python3", f"{LAUNCHER_MOUNT}/launcher.py"],
            "args": [f"{key}={given(key).argument}" for key in (*inputs.parameters, *inputs.artifacts)],
            "env": [
                *_environment(self.container, self.settings, self.retry, self.where),
                *place,
                {"name": "TANDEM_TASK", "value": _task(self.component, self.container)},
            ],
            "resources": _resources(self.container.resources, self.where),
            "volumeMounts": [
                {"name": LAUNCHER_VOLUME, "mountPath": LAUNCHER_MOUNT, "readOnly": True},
                *s3,
                *mounts,
            ],
            "securityContext": _security(self.settings, self.where),
            # The launcher leaves the task's last words as the node's message; where it cannot start, the log has them.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        return _filled(container)


def input_parameters(component: Component) -> list[dict[str, Any]]:
    """A component's inputs as inputs of its template; one without a default that may be left out is JSON's null."""
    inputs = component.input_definitions
    written: list[dict[str, Any]] = []
    for name, parameter in inputs.parameters.items():
        default = {"default": text(parameter.default_value)} if parameter.is_optional else {}
        written.append({"name": name, **default})
    for name, artifact in inputs.artifacts.items():
        written.append({"name": name, **({"default": "null"} if artifact.is_optional else {})})
    return written


def retry_strategy(retry: RetryPolicy, where: str) -> dict[str, Any]:
    """KFP's retry policy as its own compiler writes it: no `retryPolicy`, so only a task that failed runs again.

    A pod that is deleted or whose node is lost counts as an error in Argo and is not retried, here as on Kubeflow.

    Raises:
        BadConfig: Argo takes whole factors only.
    """
    if retry.backoff_factor != int(retry.backoff_factor):
        raise BadConfig(
            f"{where}: backoff_factor {retry.backoff_factor} of set_retry is no whole number, which Argo needs; use"
            f" {max(1, round(retry.backoff_factor))}"
        )
    return {
        "limit": str(retry.max_retry_count),
        "backoff": {
            "duration": retry.backoff_duration.removesuffix("s"),
            "factor": str(int(retry.backoff_factor)),
            "maxDuration": retry.backoff_max_duration.removesuffix("s"),
        },
    }


def fixed(source: ParameterSource | None, name: str, construct: str, where: str) -> Any:
    """A Kubernetes setting's value, which has to be known when the pipeline is compiled.

    Args:
        source: Where newer kfp-kubernetes says it; a constant.
        name: Where older kfp-kubernetes says it.
        construct: Of the IR, for the message.

    Raises:
        BadConfig: it comes from a parameter or a task.
    """
    if source is None:
        value = name
    elif source.runtime_value is not None and not source.parameter_expression_selector:
        value = source.runtime_value.constant
    else:
        value = None
    if value in (None, "") or "{{$" in str(value):
        raise BadConfig(
            f"{where}: {construct} comes from a parameter, which is not translated to Argo; give a constant to"
            " kfp.kubernetes"
        )
    return value


def _image(image: str, where: str) -> str:
    if "{{" in image or not image:
        raise BadConfig(
            f"{where}: image '{image}' comes from a parameter, which is not translated to Argo; name the image"
        )
    if image.startswith("argostub/"):
        raise BadConfig(
            f"{where}: '{image.removeprefix('argostub/')}' (kfp.kubernetes.CreatePVC, DeletePVC) is not translated to"
            " Argo; create the claim with kubectl and mount it by name"
        )
    return image


def _environment(
    container: Container, settings: KubernetesSettings, retry: RetryPolicy | None, where: str
) -> list[dict[str, Any]]:
    fields = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid"}
    environment: list[dict[str, Any]] = [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()
    ]
    if retry:
        environment.append({"name": "KFP_RETRY_INDEX", "value": "{{retries}}"})
    for variable in container.env:
        if "{{" in variable.value:
            raise BadConfig(
                f"{where}: environment variable {variable.name} holds a placeholder, which is not translated to Argo;"
                " pass the value as a parameter"
            )
        environment.append({"name": variable.name, "value": variable.value})
    for secret in settings.secret_as_env:
        reference = {"name": fixed(secret.secret_name_parameter, secret.secret_name, "secretAsEnv", where)}
        for key in secret.key_to_env:
            source = {**reference, "key": key.secret_key, **_optional(secret.optional)}
            environment.append({"name": key.env_var, "valueFrom": {"secretKeyRef": source}})
    for config in settings.config_map_as_env:
        reference = {"name": fixed(config.config_map_name_parameter, config.config_map_name, "configMapAsEnv", where)}
        for key in config.key_to_env:
            source = {**reference, "key": key.config_map_key, **_optional(config.optional)}
            environment.append({"name": key.env_var, "valueFrom": {"configMapKeyRef": source}})
    for field in settings.field_path_as_env:
        environment.append({"name": field.name, "valueFrom": {"fieldRef": {"fieldPath": field.field_path}}})
    return environment


def _task(component: Component, container: Container) -> str:
    """What the launcher needs to know of the task, as JSON text."""
    inputs, outputs = component.input_definitions, component.output_definitions
    hidden: Any = {"description", "artifact_type", "is_artifact_list"}
    known = {
        "command": container.command,
        "args": container.args,
        "parameters": {
            key: definition.model_dump(by_alias=True, exclude=hidden, exclude_defaults=True)
            for key, definition in inputs.parameters.items()
        },
        "artifacts": list(inputs.artifacts),
        "outputParameters": {key: definition.parameter_type for key, definition in outputs.parameters.items()},
        "outputArtifacts": {
            key: {
                "type": definition.artifact_type.model_dump(by_alias=True, exclude_defaults=True),
                **_filled({"metadata": definition.metadata}),
            }
            for key, definition in outputs.artifacts.items()
        },
    }
    lines = [f"{json.dumps(key)}: {json.dumps(part, ensure_ascii=False)}" for key, part in _filled(known).items()]
    return guarded("{\n" + ",\n".join(lines) + "\n}")


def _resources(resources: Resources, where: str) -> dict[str, Any]:
    # Older compilers write numbers: CPUs, and gigabytes (10^9) of memory.
    amounts = {
        ("requests", "cpu"): resources.resource_cpu_request or _number(resources.cpu_request, ""),
        ("requests", "memory"): resources.resource_memory_request or _number(resources.memory_request, "G"),
        ("limits", "cpu"): resources.resource_cpu_limit or _number(resources.cpu_limit, ""),
        ("limits", "memory"): resources.resource_memory_limit or _number(resources.memory_limit, "G"),
    }
    if resources.accelerator is not None:
        accelerator = resources.accelerator
        kind = accelerator.resource_type or accelerator.type
        amounts["limits", kind] = accelerator.resource_count or _number(accelerator.count, "")
    written: dict[str, Any] = {}
    for (bound, kind), amount in amounts.items():
        if "{{" in kind or "{{" in amount:
            raise BadConfig(
                f"{where}: the {kind if '{{' not in kind else 'accelerator'} {bound.removesuffix('s')} comes from a"
                " parameter, which is not translated to Argo; give a constant amount"
            )
        if amount and kind:
            written.setdefault(bound, {})[kind] = amount
    return written


def _number(amount: float, unit: str) -> str:
    return f"{amount:g}{unit}" if amount else ""


def _security(settings: KubernetesSettings, where: str) -> dict[str, Any]:
    """KFP's own hardening of every task, and the identity that the pipeline asks for."""
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    asked = settings.security_context
    if asked is not None:
        if asked.run_as_user == 0 and asked.run_as_non_root:
            raise BadConfig(f"{where}: runAsUser is 0 (root), but runAsNonRoot is set; name another user")
        context |= asked.model_dump(by_alias=True, exclude_none=True)
    return context


def _volumes(settings: KubernetesSettings, where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pod's own volumes, and where they are mounted."""
    volumes: dict[str, dict[str, Any]] = {}
    mounts = []
    for secret in settings.secret_as_volume:
        name = fixed(secret.secret_name_parameter, secret.secret_name, "secretAsVolume", where)
        volume_name = _unnamed(volumes, name, {"secret": {"secretName": name, "optional": secret.optional}})
        mounts.append({"name": volume_name, "mountPath": secret.mount_path})
    for config in settings.config_map_as_volume:
        name = fixed(config.config_map_name_parameter, config.config_map_name, "configMapAsVolume", where)
        volume_name = _unnamed(volumes, name, {"configMap": {"name": name, "optional": config.optional}})
        mounts.append({"name": volume_name, "mountPath": config.mount_path})
    for claim in settings.pvc_mount:
        name = fixed(claim.pvc_name_parameter, claim.constant, "pvcMount", where)
        volume_name = _unnamed(volumes, name, {"persistentVolumeClaim": {"claimName": name}})
        mounts.append(_filled({"name": volume_name, "mountPath": claim.mount_path, "subPath": claim.sub_path}))
    for directory in settings.empty_dir_mounts:
        empty = _filled({"medium": directory.medium, "sizeLimit": directory.size_limit})
        _named(volumes, directory.volume_name, {"emptyDir": empty}, where)
        mounts.append({"name": directory.volume_name, "mountPath": directory.mount_path})
    for volume in settings.generic_ephemeral_volume:
        spec = {"accessModes": volume.access_modes, "resources": {"requests": {"storage": volume.size}}}
        if not volume.default_storage_class:
            spec["storageClassName"] = volume.storage_class_name
        metadata = _filled(volume.metadata.model_dump())
        template = _filled({"metadata": metadata}) | {"spec": spec}
        _named(volumes, volume.volume_name, {"ephemeral": {"volumeClaimTemplate": template}}, where)
        mounts.append({"name": volume.volume_name, "mountPath": volume.mount_path})
    return [{"name": name, **source} for name, source in volumes.items()], mounts


def _unnamed(volumes: dict[str, dict[str, Any]], after: str, source: dict[str, Any]) -> str:
    """Add a volume to which the pipeline gives no name; returns one that no other source has."""
    base = re.sub(r"[^a-z0-9-]", "-", after)[:60].strip("-")
    name, number = base, 1
    while name in RESERVED_VOLUMES or volumes.get(name, source) != source:
        number += 1
        name = f"{base}-{number}"
    volumes[name] = source
    return name


def _named(volumes: dict[str, dict[str, Any]], name: str, source: dict[str, Any], where: str) -> None:
    """Add a volume with the pipeline's own name for it."""
    if name in RESERVED_VOLUMES or volumes.get(name, source) != source:
        raise BadConfig(f"{where}: another volume is called '{name}' too; give this one another volume_name")
    volumes[name] = source


def _placement(settings: KubernetesSettings, where: str) -> dict[str, Any]:
    """Where the pod may run, and with which secrets its image is pulled."""
    selector: dict[str, str] = settings.node_selector.labels
    if settings.node_selector.node_selector_json is not None:
        selector = fixed(settings.node_selector.node_selector_json, "", "nodeSelectorJson", where)
    tolerations: list[Any] = []
    for toleration in settings.tolerations:
        if toleration.toleration_json is not None:
            given_json = fixed(toleration.toleration_json, "", "tolerationJson", where)
            tolerations += given_json if isinstance(given_json, list) else [given_json]
        else:
            tolerations.append(toleration.model_dump(by_alias=True, exclude_defaults=True))
    secrets = [
        {"name": fixed(secret.secret_name_parameter, secret.secret_name, "imagePullSecret", where)}
        for secret in settings.image_pull_secret
    ]
    return {
        "nodeSelector": selector,
        "tolerations": tolerations,
        "affinity": _affinity(settings.node_affinity, where),
        # Argo knows pull secrets of a whole workflow only.
        "podSpecPatch": json.dumps({"imagePullSecrets": secrets}) if secrets else "",
    }


def _affinity(terms: list[NodeAffinityTerm], where: str) -> dict[str, Any]:
    required: list[Any] = []
    preferred: list[Any] = []
    for term in terms:
        if term.node_affinity_json is not None:
            affinity = dict(fixed(term.node_affinity_json, "", "nodeAffinityJson", where))
            required += affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
            preferred += affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
            continue
        matches = term.model_dump(by_alias=True, exclude_defaults=True, exclude={"weight"})
        if not matches:
            continue
        if term.weight is None:
            required.append(matches)
        else:
            preferred.append({"weight": term.weight, "preference": matches})
    return _filled(
        {
            "nodeAffinity": _filled(
                {
                    "requiredDuringSchedulingIgnoredDuringExecution": _filled({"nodeSelectorTerms": required}),
                    "preferredDuringSchedulingIgnoredDuringExecution": preferred,
                }
            )
        }
    )


def _optional(optional: bool | None) -> dict[str, bool]:
    return {} if optional is None else {"optional": optional}


def _filled(parts: dict[str, Any]) -> dict[str, Any]:
    """A mapping without its empty parts."""
    return {key: part for key, part in parts.items() if part not in (None, "", 0, [], {})}
