"""Guards of one compile -> the same guards, with roles in the mesh in place of the names of process groups.

A name is a number that each process counts up, `'1'`: a string of the user's may look the same. It is taken for a name
only where torch's text says so: by what the guarded attribute is called, by the type of the entry of a dict that has
it as key, or by the line that asked for the guard, where the program communicates in that group or looks it up.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from tpcompile.evidence.records import Guard
from tpcompile.evidence.text.normalise import GroupRoles

Place = tuple[str, int, str]
"""File and line at which a program uses a process group, and the role of the group."""

_EQUALS = re.compile(r"^(?P<subject>.+) == '(?P<name>[^']*)'$")
_CALLED_NAME = re.compile(r"(?:group_name|pg_name)\S*$")
_ENTRY = re.compile(
    r"^___check_\w+\((?P<container>[LG]\[.+)\['(?P<name>[^']*)'\]\),"
    r" type=<(?:class ')?torch\.distributed\.distributed_c10d\.ProcessGroup\b"
)
"""A process group in a dict; torch 2.11 checks its identity, 2.13 its type."""
_TAKES_NAMES = re.compile(
    r"(?:^|/)(?:distributed/(?:_functional_collectives|device_mesh|distributed_c10d)|tpcompile/ranks/groups)\.py$"
)
"""Code of torch and ours that compares strings with names only: of groups, axes and ops."""


def with_roles(guards: Sequence[Guard], roles: GroupRoles, issued: Collection[Place]) -> tuple[Guard, ...]:
    """The guards with `group:ROLE` for each name; `issued` is where the graphs of this compile communicate."""
    named: dict[str, str] = {}
    for guard in guards:
        compared = _EQUALS.match(guard.expression)
        if compared and _CALLED_NAME.search(compared["subject"]):
            named[compared["subject"]] = compared["name"]
    for name in named.values():
        roles(name)  # a role for a group that the mesh does not have
    entries = _entries(guards, named, roles)
    by_container = dict(entries)
    places = set(issued)
    for guard in guards:
        if guard.line and guard.source in by_container:  # the program looks up a group by its name there
            places.add((guard.line.file, guard.line.line, roles(by_container[guard.source])))
    replaced: list[Guard] = []
    for guard in guards:
        found = _with_role(guard, roles, places)
        for container, name in entries:
            found = _with_key(found, container, f"'{name}'", f"group:{roles(name)}")
        replaced.append(found)
    return tuple(replaced)


def _entries(guards: Iterable[Guard], named: dict[str, str], roles: GroupRoles) -> list[tuple[str, str]]:
    """(dict, key) of each process group that the dict has under its own name, not under a key of the user's; `named`
    maps an attribute that holds a name to the name."""
    entries: list[tuple[str, str]] = []
    for guard in guards:
        entry = _ENTRY.match(guard.expression)
        if entry is None:
            continue
        container, name = entry.groups()
        own_name = named.get(f"{container}['{name}'].group_name", name)
        if own_name == name and roles.knows(name):
            entries.append((container, name))
    return list(dict.fromkeys(entries))


def _with_role(guard: Guard, roles: GroupRoles, places: Collection[Place]) -> Guard:
    """The guard, where it compares a string with the name of a group."""
    compared = _EQUALS.match(guard.expression)
    if compared is None:
        return guard
    subject, name = compared.groups()
    is_name = _CALLED_NAME.search(subject) is not None
    line = guard.line
    if line is not None and roles.knows(name):  # the line that asked for the guard may take the string as a name
        is_name |= _TAKES_NAMES.search(line.file) is not None
        is_name |= (line.file, line.line, roles(name)) in places
    return _changed(guard, expression=f"{subject} == group:{roles(name)}") if is_name else guard


def _with_key(guard: Guard, container: str, key: str, role: str) -> Guard:
    """The guard, where it reads an entry of the dict, or is about its keys."""
    entry = f"{container}[{key}]"
    source = guard.source.replace(entry, f"{container}[{role}]")
    expression = guard.expression
    if container in expression:
        expression = expression.replace(key, role)
    return _changed(guard, source=source, expression=expression)


def _changed(guard: Guard, **fields: str) -> Guard:
    is_equal = all(getattr(guard, name) == value for name, value in fields.items())
    return guard if is_equal else guard.changed(**fields)
