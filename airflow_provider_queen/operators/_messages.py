"""Messages as Dag authors write them: payloads or whole messages, literal or templated."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_queen.client.inputs import MAX_NAME_LENGTH, MESSAGE_KEYS
from airflow_provider_queen.client.options import nearest
from airflow_provider_queen.exceptions import InvalidOptionError

if TYPE_CHECKING:
    from airflow.sdk import Context

_TEMPLATE_MARKS = ("{{", "{%", "{#")
_PLAIN = (bool, int, float, bytes, type(None))


def is_literal(value: object) -> bool:
    """Whether a value stands as it will be used: no template, no XCom and no callable in it."""
    if isinstance(value, str):
        return not any(mark in value for mark in _TEMPLATE_MARKS)
    if isinstance(value, Mapping):
        return all(is_literal(key) and is_literal(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_literal, value))
    return isinstance(value, _PLAIN) or not (callable(value) or hasattr(value, "resolve"))


def to_message(what: str, item: Any) -> dict[str, Any]:
    """A message for ``push``. A mapping with the key ``payload`` is one already; all else is a payload."""
    if not isinstance(item, Mapping) or "payload" not in item:
        return {"payload": item}
    for key in item:
        if key not in MESSAGE_KEYS:
            raise InvalidOptionError(
                f"{what} has the key 'payload' and the unknown key {key!r}; the nearest is"
                f" {nearest(key, MESSAGE_KEYS)!r}. A payload that has a key 'payload' itself goes into one:"
                " {'payload': {…}}"
            )
    return dict(item)


def to_messages(items: Any) -> list[dict[str, Any]]:
    """What was given as ``messages``, after templating: a list, or the JSON text of one."""
    if isinstance(items, str):
        items = _parse(items)
    if isinstance(items, Mapping | bytes) or not isinstance(items, Iterable):
        raise InvalidOptionError(f"messages is a {type(items).__name__}, needed is a list")
    return [to_message(f"message {position}", item) for position, item in enumerate(items)]


def with_defaults(message: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The message, with defaults for what it does not name."""
    named = {key: value for key, value in message.items() if value is not None or key == "payload"}
    return {**{key: value for key, value in defaults.items() if value is not None}, **named}


def derived_id(parts: Sequence[object]) -> str:
    """A transaction id that is the same each time: the parts, or their hash where they are long."""
    text = "/".join(map(str, parts))
    if len(text) <= MAX_NAME_LENGTH:
        return text
    return f"sha256/{hashlib.sha256(text.encode()).hexdigest()}"


def task_id_parts(context: Context) -> tuple[object, ...]:
    """What names a task of a run, the same in each of its tries."""
    ti = context["ti"]
    return ti.dag_id, ti.run_id, ti.task_id, -1 if ti.map_index is None else ti.map_index


def call_with_context(function: Callable[..., Any], arguments: Sequence[Any], context: Context) -> Any:
    """Call a Dag author's function with arguments and, by their names, what it asks for of the context."""
    wanted: dict[str, Any] = {}
    with suppress(ValueError):  # a builtin has no signature
        parameters = list(inspect.signature(function).parameters.values())
        taken = {parameter.name for parameter in parameters[: len(arguments)]}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names = set(context)
        else:
            names = {parameter.name for parameter in parameters} & set(context)
        wanted = {name: value for name, value in context.items() if name in names - taken}
    return function(*arguments, **wanted)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    # Out here: the parser's error has the whole text in it.
    raise InvalidOptionError(
        "messages is a text after templating, and no JSON: write {{ … | tojson }}, pass the task's output"
        " itself, or set render_template_as_native_obj"
    )
