"""The sampling defaults that a checkpoint brings: generation_config.json as a SamplingParams.

Owns: which of its fields count. Must not know: engines, jax.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from jaxvllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's name -> ours; the fields that vLLM takes over. Its end tokens are ModelConfig's."""


def default_params(path: Path | None) -> SamplingParams:
    """The defaults of the checkpoint in directory ``path``; those of SamplingParams without one or without the file.

    What is taken is logged. Raises ValueError that names the file and the field.
    """
    file = None if path is None else path / "generation_config.json"
    if file is None or not file.is_file():
        return SamplingParams()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        taken = {ours: found[theirs] for theirs, ours in FIELDS.items() if found.get(theirs) is not None}
        params = SamplingParams(**taken)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: {error}; mend it, or pass generation_config='none'") from error
    if taken:
        logger.info(
            "requests without sampling_params get %s from %s; generation_config='none' switches that off", taken, file
        )
    return params
