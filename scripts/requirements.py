"""``spec/requirements.json``: every requirement of SPEC.md, and the proof that each is tested.

``python -m scripts.requirements`` writes what follows from the text anew: id, level,
roles, the codes that the sentence names, and the sentence's SHA-256. What people decided
stays: ``tests`` (tests of ours, for what no fixture can show) and ``reviewed``, the hash
of the sentence that the cases were last compared with. A reworded sentence has another
hash, and ``tests/test_spec_coverage.py`` fails until somebody has looked at its cases
and says so: ``python -m scripts.requirements --reviewed KV-ABC-001 …``.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
SPEC: Final = ROOT / "SPEC.md"
REQUIREMENTS: Final = ROOT / "spec" / "requirements.json"
_LINE: Final = re.compile(r"- (KV-[A-Z]{3}-\d{3}) (\S.*)")
_LEVELS: Final = (
    ("MUST", r"\b(MUST|REQUIRED|SHALL)\b"), ("SHOULD", r"\b(SHOULD|RECOMMENDED)\b"), ("MAY", r"\b(MAY|OPTIONAL)\b"),
)  # fmt: skip
_ROLES: Final = ("reader", "store", "verifier", "writer")
_CODE: Final = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`")


def sentences() -> dict[str, str]:
    """The sentence of every requirement, in the text's order."""
    found = (_LINE.fullmatch(line) for line in SPEC.read_text().splitlines())
    return {match[1]: match[2] for match in found if match}


def derived(key: str, sentence: str) -> dict[str, Any]:
    """What follows from a sentence. A level of ``defines`` is that of one that only says what something is."""
    level = next((name for name, words in _LEVELS if re.search(words, sentence)), "defines")
    return {
        "codes": list(dict.fromkeys(_CODE.findall(sentence))), "id": key, "level": level,
        "roles": [role for role in _ROLES if re.search(rf"\b{role}s?\b", sentence, re.IGNORECASE)],
        "sha256": hashlib.sha256(sentence.encode()).hexdigest(),
    }  # fmt: skip


def recorded() -> list[dict[str, Any]]:
    """The file as it is."""
    value: list[dict[str, Any]] = json.loads(REQUIREMENTS.read_text()) if REQUIREMENTS.exists() else []
    return value


def updated(reviewed: set[str]) -> list[dict[str, Any]]:
    """The file as it must be; sentences in ``reviewed`` count as looked at."""
    kept = {item["id"]: item for item in recorded()}
    result = []
    for key, sentence in sentences().items():
        item = derived(key, sentence)
        old = kept.get(key, {"reviewed": None, "tests": []})
        item["reviewed"] = item["sha256"] if key in reviewed else old["reviewed"]
        result.append({**item, "tests": old["tests"]})
    return result


def main(args: list[str]) -> None:
    """Write the file and list the sentences whose cases are to be looked at."""
    named = set(args) - {"--reviewed"}
    found = updated((named or set(sentences())) if "--reviewed" in args else set())
    REQUIREMENTS.write_text(json.dumps(found, indent=1) + "\n")
    for item in found:
        if item["reviewed"] != item["sha256"]:
            sys.stdout.write(f"look at the cases of {item['id']}: {sentences()[item['id']]}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
