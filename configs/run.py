"""RunConfig: everything one post-training run is told, with the unit and meaning of each field.

A run file (configs/runs/*.yaml) names only what differs from the defaults below. `tandem run FILE -s train.steps=50`
overrides any field, `tandem run FILE --dry-run` prints the whole resolved configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from configs.address import Address, WebAddress
from configs.document import Document, read_yaml, validated
from configs.failure import BadConfig
from configs.kernels import KernelsConfig
from configs.kubernetes import KubernetesConfig
from configs.sglang import SGLangConfig
from configs.train import TrainConfig
from configs.transport import TransportConfig

RUNS = Path(__file__).parent / "runs"


class StorageConfig(Document):
    """Where a run keeps what must outlive it."""

    root: str = "runs"
    """URI (`s3://bucket/prefix`, `file:///path`) or path; the run's files go under `<root>/<run name>/`."""
    scratch: str = "runs"
    """Local directory for logs, the embedded Redis and MLflow, and the weights store; the run uses `<scratch>/<run name>/`."""
    endpoint_url: WebAddress = ""
    """Address of an S3-compatible server; empty means the AWS default."""
    max_concurrency: int = Field(default=8, ge=1, le=256)
    """Parallel transfers of one upload or download."""


class DataConfig(Document):
    """The prompts a run learns from, one row a prompt."""

    uri: str = "example:add2r"
    """JSONL or Parquet file (`s3://`, `file://` or a path), or `example:add2r`, `example:sort8`, `example:rev8`."""
    rows: int = Field(default=10_000, ge=1)
    """Rows to write when `uri` names an example task; other sources are read whole."""
    id_field: str = "id"
    """Column with a row's unique id; a source without the column gets the digest of its row."""
    prompt_field: str = "prompt"
    """Column with the text the policy is given."""
    answer_field: str = "answer"
    """Column with the reference that the verifier is given."""
    eval_fraction: float = Field(default=0.06, gt=0, lt=1)
    """Share of rows held out for evaluation, chosen by a hash of the prompt so that it never moves."""


class ModelConfig(Document):
    """The policy: a checkpoint, or the geometry of a new Qwen3-MoE that the warm start trains first."""

    checkpoint: str = ""
    """URI of a Hugging Face safetensors checkpoint to start from; empty means: build the geometry below and warm-start it."""
    hidden_size: int = Field(default=128, ge=8)
    num_hidden_layers: int = Field(default=4, ge=1)
    num_attention_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=8)
    num_experts: int = Field(default=8, ge=2)
    num_experts_per_tok: int = Field(default=2, ge=1)
    moe_intermediate_size: int = Field(default=128, ge=8)
    context_length: int = Field(default=256, ge=8)
    """Tokens of prompt and completion together."""

    @model_validator(mode="after")
    def _shapes_agree(self) -> ModelConfig:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}; lower the former"
            )
        for name in ("hidden_size", "moe_intermediate_size", "head_dim"):
            if getattr(self, name) % 8:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not a multiple of 8, which the kernels need; round it"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads"
                f" {self.num_key_value_heads}; choose a multiple"
            )
        return self


class WarmStartConfig(Document):
    """Supervised warm start of a new model: stops at a target, because the loss falls in one sudden step."""

    target_exact_match: float = Field(default=0.25, ge=0, le=1)
    """Greedy exact match on held-out prompts at which the warm start ends (fraction)."""
    max_steps: int = Field(default=800, ge=1)
    """Optimizer steps after which it ends with an error if the target was not met."""
    batch_size: int = Field(default=128, ge=1)
    """Rows an optimizer step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    warmup_steps: int = Field(default=30, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    load_balance: float = Field(default=0.01, ge=0)
    """Weight of the router's load-balance loss."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    eval_every: int = Field(default=10, ge=1)
    """Optimizer steps between looks at the target."""


class RolloutConfig(Document):
    """Generation: which engine, how many completions a prompt."""

    engine: Literal["torch", "sglang"] = "torch"
    """`torch` generates in the rollout process itself, on the CPU; `sglang` in a server of its own (section `sglang`)."""
    workers: int = Field(default=1, ge=1)
    """Rollout processes, each with one engine."""
    group_size: int = Field(default=8, ge=1)
    """Completions a prompt (G)."""
    groups_per_call: int = Field(default=32, ge=1)
    """Groups a worker has in generation at a time."""
    update: Literal["in_place", "retract", "abort"] = "in_place"
    """What becomes of running generations when new weights arrive: they go on with the keys and values they have, go on
    with these computed anew, or end and are taken up again as partial generations. Tokens carry their version always."""
    max_new_tokens: int = Field(default=4, ge=1)
    """Tokens a completion may have, the end-of-sequence token included."""
    temperature: float = Field(default=1.0, gt=0)
    lease_s: float = Field(default=30.0, gt=0)
    """Seconds a worker may hold a ticket before another may claim it."""


class RewardConfig(Document):
    """How completions are scored."""

    verifier: str = "exact_match"
    """A registered verifier (`exact_match`, `numeric`, `contains`), `http`, or `package.module:function`."""
    url: WebAddress = ""
    """Address that `verifier: http` posts to, with REWARD_TOKEN as bearer token if that is set."""
    processes: int = Field(default=1, ge=1)
    """Verifier processes; one that overruns its time is killed and replaced."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a group's verification may take; past that the group is dropped with reason `reward_timeout`."""


class LoopConfig(Document):
    """The asynchronous loop: how far rollout may run ahead, and how failure is noticed."""

    max_staleness: int = Field(default=1, ge=0)
    """Versions a group may lag behind the policy that trains on it; 0 makes the loop synchronous."""
    no_progress_s: float = Field(default=120.0, gt=0)
    """Seconds without a committed group or a new version after which the run ends with a typed error; those in which
    training starts, publishes a version, or restores or stores a checkpoint do not count."""
    checkpoint_s: float = Field(default=1800.0, gt=0)
    """Seconds that training may take to start, to publish a version, or to restore or store a checkpoint."""
    roles: Literal["processes", "kubernetes"] = "processes"
    """What the roles are: processes beside rl_loop, or pods it creates (`tandem submit` sets it)."""
    max_restarts: int = Field(default=3, ge=0)
    """Times the loop restarts a role that died; the next death ends the run."""
    redis_url: Address = ""
    """Redis for the experience streams (its password in REDIS_PASSWORD); empty starts one beside the run."""
    redis_port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded Redis; 0 takes a free one."""


class WeightsConfig(Document):
    """Versions of the policy on their way from training to rollout."""

    keep: int = Field(default=4, ge=2)
    """Versions kept in the weights store, besides those that an engine still holds."""
    verify_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds an engine may take to load and prove a version before it is quarantined."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that versions are published and served in; training itself keeps float32."""
    deltas: int = Field(default=0, ge=0, le=64)
    """Versions in a row that may be stored as the difference from the one before; 0 stores every version whole."""
    transfer: Literal["pull", "collective"] = "pull"
    """How running SGLang engines get a version: each reads it from the store, or broadcast sends it to all at once.
    Engines that join, or that a collective transfer left behind, always read it from the store."""
    collective_backend: Literal["gloo", "nccl"] = "gloo"
    """What carries a collective transfer; `nccl` needs a GPU for broadcast too."""
    bucket_mib: int = Field(default=16, ge=1)
    """Size of one message of a collective transfer, in MiB; 16 to 32 was fastest with gloo."""
    transfer_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds a collective transfer may wait for an engine before it goes on without it."""


class EvaluateConfig(Document):
    """Greedy scoring on held-out prompts, and the rule for promotion."""

    rows: int = Field(default=512, ge=1)
    """Held-out prompts scored, at most."""
    every: int = Field(default=25, ge=1)
    """Versions between evaluations while the loop runs (done by rollout worker 0)."""
    margin: float = Field(default=0.0, ge=0, le=1)
    """The candidate becomes champion only if its exact match exceeds the champion's by more than this (fraction)."""
    bootstrap_samples: int = Field(default=2000, ge=100)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Two-sided level of the bootstrap intervals."""


class TrackingConfig(Document):
    """MLflow: where runs, metrics, manifests and models are recorded."""

    uri: WebAddress = ""
    """Tracking server; empty starts one beside the runs (SQLite and a local artifact folder)."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded server; 0 takes a free one."""
    experiment: str = "tandem"
    registered_model: str = ""
    """Name in the model registry; empty means `<experiment>-<name of the data>`."""
    sample_rows: int = Field(default=200, ge=0)
    """Rows of the logged samples table, at most."""


class RunConfig(Document):
    """One post-training run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    """Name of the run: lower-case letters, digits and hyphens; also the prefix of everything the run creates."""
    seed: int = Field(default=0, ge=0)
    stack: str = "cpu"
    """Tested set of versions: a file in configs/stacks."""
    hardware: str = "laptop"
    """Hardware profile: a file in configs/hardware."""
    storage: StorageConfig = StorageConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    sglang: SGLangConfig = SGLangConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    kernels: KernelsConfig = KernelsConfig()
    loop: LoopConfig = LoopConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tracking: TrackingConfig = TrackingConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _parts_agree(self) -> RunConfig:
        group, batch = self.rollout.group_size, self.train.batch_groups
        if group < 2:
            raise ValueError(
                "rollout.group_size is 1, but the group's mean is the baseline, so every advantage would be 0;"
                " set rollout.group_size to 2 or more"
            )
        if batch % self.train.minibatches:
            raise ValueError(
                f"train.batch_groups {batch} is not divisible by train.minibatches {self.train.minibatches};"
                " choose a batch that is a multiple"
            )
        if self.rollout.max_new_tokens >= self.model.context_length:
            raise ValueError(
                f"rollout.max_new_tokens {self.rollout.max_new_tokens} leaves no room for a prompt in"
                f" model.context_length {self.model.context_length}; raise the context or lower the completion"
            )
        if self.loop.roles == "kubernetes" and not self.storage.root.startswith("s3://"):
            raise ValueError(
                f"loop.roles is kubernetes, but storage.root is {self.storage.root}, which pods do not share; set"
                " storage.root to s3://bucket/prefix"
            )
        if self.loop.roles == "kubernetes" and not self.name[0].isalpha():
            raise ValueError(
                f"name {self.name} begins with a digit, which Kubernetes refuses for a Service; begin with a letter"
            )
        self._ranks_agree()
        if self.rollout.engine == "sglang":
            self._engines_agree()
        if self.reward.verifier == "http" and not self.reward.url:
            raise ValueError("reward.verifier is http, but reward.url is empty; give the address to post to")
        return self

    def _ranks_agree(self) -> None:
        """Whether the training ranks can be divided as asked."""
        ranks, experts = self.train.ranks, self.train.expert_parallel
        if ranks % experts:
            raise ValueError(
                f"train.expert_parallel {experts} does not divide train.ranks {ranks}; choose a divisor of the ranks"
            )
        if not self.model.checkpoint and self.model.num_experts % experts:
            raise ValueError(
                f"train.expert_parallel {experts} does not divide model.num_experts {self.model.num_experts}; choose a"
                " divisor of the experts"
            )
        nodes = self.kubernetes.train.nodes
        if self.loop.roles == "kubernetes" and ranks % nodes:
            raise ValueError(
                f"train.ranks {ranks} cannot be spread evenly over kubernetes.train.nodes {nodes}; choose a multiple"
            )

    def _engines_agree(self) -> None:
        """What SGLang needs of the other sections."""
        sglang = self.sglang
        if sglang.urls and len(sglang.urls) < self.rollout.workers:
            raise ValueError(
                f"sglang.urls names {len(sglang.urls)} servers for {self.rollout.workers} rollout workers; name one a worker"
            )
        if sglang.urls and self.loop.roles == "kubernetes":
            raise ValueError(
                "sglang.urls is for processes; among pods give sglang.service, or let every pod start its own"
            )
        if sglang.data_parallel_attention > 1:
            raise ValueError(
                f"sglang.data_parallel_attention is {sglang.data_parallel_attention}, but how it divides the weights is not"
                " known here, so that no engine could prove what it holds; set 1"
            )

    @property
    def collective(self) -> bool:
        """Whether broadcast sends versions to the engines itself."""
        return self.rollout.engine == "sglang" and self.weights.transfer == "collective"

    @property
    def registered_model(self) -> str:
        """Name of this run's model in the registry."""
        return self.tracking.registered_model or self.tracking.experiment

    def to_json(self) -> str:
        """The whole configuration as one line of JSON: the string that pipelines pass between steps."""
        return self.model_dump_json()

    def to_yaml(self) -> str:
        """The whole configuration as YAML, in the order of the fields."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_json(cls, text: str, source: str = "configuration") -> RunConfig:
        """Read what `to_json` wrote.

        Raises:
            BadConfig: the text is not a valid configuration.
        """
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError:
            values = None
        if not isinstance(values, dict):
            raise BadConfig(f"{source}: is not a JSON object; pass what `tandem run --dry-run` prints")
        return validated(cls, values, source)


def load_run(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a run file and apply `key=value` overrides.

    Args:
        path: A YAML file.
        overrides: `train.steps=50` and the like; the value is read as YAML.

    Raises:
        BadConfig: the file or an override is not valid.
    """
    values = read_yaml(path)
    for override in overrides:
        _apply(values, override)
    return validated(RunConfig, values, str(path) if not overrides else f"{path} with overrides")


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise BadConfig(f"override '{override}' has no '='; write it as train.steps=50")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise BadConfig(f"override '{override}': the value is not valid YAML; quote it") from None
    *parents, leaf = key.split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise BadConfig(f"override '{override}': '{parent}' is a value, not a section; check the key")
    place[leaf] = value
