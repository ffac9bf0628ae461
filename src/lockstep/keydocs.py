"""The keys of a recipe explained: for a terminal (`lockstep keys`) and for `docs/recipes.md`.

Both are made from the descriptions that the errors use, so they cannot go stale.
"""

from __future__ import annotations

from lockstep.schema import Key, Section, accepts_text, find, is_list, keys, sections_in


def markdown(section: type[Section]) -> str:
    """The reference: one table for each kind of section below `section`, with every place where it is used."""
    places: dict[type[Section], list[str]] = {}
    rows: dict[type[Section], list[Key]] = {}
    for k in keys(section):
        if not k.section:
            continue
        kind = _kind(section, k.section)
        if k.section not in places.setdefault(kind, []):
            places[kind].append(k.section)
        if k.section == places[kind][0]:
            rows.setdefault(kind, []).append(k)
    return "\n".join(_table(section, kind, places[kind], rows[kind]) for kind in places)


def _kind(section: type[Section], path: str) -> type[Section]:
    field = find(section, path)
    assert field is not None
    (kind,) = sections_in(field.annotation)
    return kind


def _table(section: type[Section], kind: type[Section], places: list[str], rows: list[Key]) -> str:
    field = find(section, places[0])
    assert field is not None
    lines = [
        "### " + ", ".join(f"`[{place}]`" for place in places),
        "",
        " ".join((kind.__doc__ or "").split()) or field.description or "",
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for k in rows:
        default = k.default if k.default in ("required", "unset") else f"`{k.default}`"
        cells = (f"`{k.name}`", k.expected, default, k.field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def listing(shown: list[Key]) -> str:
    """Keys as text for a terminal: a line for a section, two for a key."""
    lines = []
    for k in shown:
        if sections_in(k.field.annotation) and not accepts_text(k.field.annotation) and not is_list(k.field.annotation):
            lines.append(f"[{k.path}]  {k.field.description}")
        else:
            lines.append(f"  {k.path} = {k.default}\n      {k.expected}. {k.field.description}")
    return "\n".join(lines)
