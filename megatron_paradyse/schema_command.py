"""`megatron-paradyse schema`: JSON Schema of the YAML files, for editors.

Made from what reads those files: Settings, the keys of train_command.py, the names of flag_file.py.
An editor sees what JSON Schema can say; keys given twice and what needs the model, only a run does.
"""

from __future__ import annotations

import json
from typing import Any

import click

from megatron_paradyse.setting_kinds import DEFINITIONS, STRATEGY, TEXT, Schema, by_layer

DRAFT = "http://json-schema.org/draft-07/schema#"


def _file(title: str, properties: Schema, **more: Any) -> Schema:
    """A schema of a whole file: a mapping of no other keys than these."""
    whole = {"$schema": DRAFT, "title": title, "definitions": DEFINITIONS}
    return {**whole, **_mapping(properties), **more}


def _mapping(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _settings() -> Schema:
    from megatron_paradyse.settings import FIELDS

    properties = {}
    for name, field in FIELDS.items():
        default = {} if field.default is None else {"default": field.default}
        about = {"description": field.metadata["about"]}
        properties[name] = {**about, **field.metadata["kind"].schema, **default}
    return _mapping(properties)


def settings_schema() -> Schema:
    """Of --paradyse-config files."""
    title = "Settings of megatron_paradyse (--paradyse-config)"
    return _file(title, _settings()["properties"])


def train_schema() -> Schema:
    """Of files for megatron-paradyse train."""
    from megatron_paradyse.flag_file import NAME, SCALAR, VALUE
    from megatron_paradyse.train_command import LAUNCH_KEYS, OWN_KEYS, VARIABLE

    own = {
        "environment": {
            "type": "object",
            "description": "variables for the ranks",
            "patternProperties": {f"^{VARIABLE}$": SCALAR},
            "additionalProperties": False,
        },
        "script": {
            "description": "a Megatron-LM checkout's pretrain_gpt.py (default: this package's own)",
            **TEXT.schema,
            "maxLength": 200,
        },
        "megatron": {
            "type": "object",
            "description": "Megatron's flags without dashes: true gives the flag alone, false "
            "leaves it out, a list gives several values",
            "propertyNames": {"not": {"pattern": "^-*paradyse"}},
            "patternProperties": {f"^{NAME}$": VALUE},
            "additionalProperties": False,
        },
        "paradyse": {"description": "settings; without them it is off", **_settings()},
    }
    assert set(own) == set(OWN_KEYS)
    launch = {
        key: {"description": f"torchrun --{key.replace('_', '-')}", **kind.schema}
        for key, kind in LAUNCH_KEYS.items()
    }
    title = "A training for megatron-paradyse train"
    return _file(title, {**launch, **own}, required=["nproc_per_node"])


def plan_schema() -> Schema:
    """Of hand-written plans, --paradyse-policy plan:FILE."""
    by_number = by_layer(STRATEGY)
    (either,) = by_number["patternProperties"].values()
    properties = {
        "default": {"description": "what layers that are not named run", **either},
        "layers": {"description": "strategies by layer or range, from 1", **by_number},
    }
    return _file("A plan of megatron_paradyse (plan:FILE)", properties, minProperties=1)


SCHEMAS = {"settings": settings_schema, "train": train_schema, "plan": plan_schema}


def schema_text(name: str) -> str:
    """What the command writes."""
    return json.dumps(SCHEMAS[name](), indent=2) + "\n"


@click.command(epilog="Example: megatron-paradyse schema settings -o settings.json")
@click.argument("kind", metavar="settings|train|plan", type=click.Choice(list(SCHEMAS)))
@click.option("-o", "--output", metavar="FILE", help="Write it here, not to the terminal.")
def schema(kind: str, output: str | None) -> None:
    """Print the JSON Schema of a kind of YAML file, for editors.

    settings: for --paradyse-config; train: for megatron-paradyse train; plan: for
    --paradyse-policy plan:FILE. A checkout has them in configs/schema/.
    """
    text = schema_text(kind)
    if output is None:
        click.echo(text, nl=False)
        return
    from megatron_paradyse.whole_file import check_replaced, write_whole

    check_replaced(output, "a JSON Schema", ('"$schema"',))
    write_whole(output, text)
    click.echo(f"wrote {output}")
