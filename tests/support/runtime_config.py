"""The configuration that most tests of the runtime start from."""

from __future__ import annotations

from megamuon.runtime import RuntimeConfig


def plain_config(**settings: object) -> RuntimeConfig:
    """RuntimeConfig with calls of torch.distributed and costs by formula: no shared memory is set
    up and nothing is timed.  ``settings`` win over these and over the defaults.
    """
    return RuntimeConfig(**{"collectives": "grouped", "ns_cost": "closed-form", **settings})  # type: ignore[arg-type]
