"""The model card: README.md of a published checkpoint, the same text for the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from components.publish_checkpoint.export import Export
from configs.run import RunConfig


def model_card(
    config: RunConfig,
    export: Export,
    *,
    checkpoint: str,
    tracking_run: str,
    data_digest: str,
    metrics: Mapping[str, float],
) -> str:
    """Markdown with the front matter that Hugging Face's hub and tools read.

    Args:
        config: Of the run.
        export: What is published.
        checkpoint: URI it was made from.
        tracking_run: MLflow run.
        data_digest: Digest of the staged data; empty if it is not known.
        metrics: Final metrics of the loop; may be empty.
    """
    facts = {
        "Run": f"`{config.name}` (seed {config.seed})",
        "Policy update": str(export.step),
        "Parameters": f"{export.parameters:,}",
        "Weights": f"`xxh3_128:{export.weights_digest}`, {export.weights_bytes:,} bytes",
        "Made from": f"`{checkpoint}`",
        "Configuration": f"`sha256:{hashlib.sha256(config.to_json().encode()).hexdigest()}`",
        "Data": f"`{config.data.uri}`" + (f", digest `{data_digest}`" if data_digest else ""),
        "Verifier": f"`{config.reward.verifier}`",
        "MLflow run": f"`{tracking_run}`",
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [mixture-of-experts, reinforcement-learning, grpo, tandem]",
        "---",
        f"# {config.registered_model}, step {export.step}",
        "",
        "A Mixture-of-Experts policy post-trained by asynchronous GRPO with Tandem.",
        "",
        *_table(("", ""), facts),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
    ]
    if metrics:
        values = {f"`{name}`": f"{value:.6g}" for name, value in sorted(metrics.items())}
        lines += ["", "## Metrics of the loop", "", *_table(("Metric", "Value"), values)]
    lines += ["", "## Configuration", "", "```yaml", config.to_yaml().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
