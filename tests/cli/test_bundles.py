"""``kvstore export``, ``import`` and ``conformance`` on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.format.receipt import parse_receipt
from tests.cli.conftest import ROOT, Run, runner

BUNDLE = ROOT / "fixtures" / "cases" / "kinds" / "mixed"


def test_out_of_one_store_and_into_another(filled: Run, tmp_path: Path) -> None:
    other = runner(tmp_path / "other")
    for name, archive in (("folder", False), ("file.tar", True)):
        ran = filled("export", "long", "-o", tmp_path / name, "--json")
        assert ran.code == 0
        assert ran.document["archive"] is archive
        taken = other("import", tmp_path / name, "--label", name, "--json").document
        assert taken["entry_id"] == ran.document["entry_id"]
        assert taken["created"] is not archive
    assert set(other("label", "--json").document["labels"]) == {"folder", "file.tar"}
    assert other("verify", "--deep").code == 0


def test_results_are_on_standard_output_alone(filled: Run, kv: Run, tmp_path: Path) -> None:
    ran = filled("export", "long", "-o", tmp_path / "b", "--no-receipts", "--tar")
    assert ran.out == f"{tmp_path / 'b'}\n"
    assert "wrote" in ran.err
    taken = kv("import", tmp_path / "b")
    assert taken.out.startswith("sha256:")
    assert "wrote" in taken.err
    assert "already there" in kv("import", tmp_path / "b").err


@pytest.mark.parametrize(
    ("path", "code", "exit_code"),
    [("none", "USAGE", 2), ("container/unknown-file", "BUNDLE_LAYOUT_INVALID", 4), ("json/bom", "JSON_BOM", 4),
     ("object/frame-checksum", "ZSTD_CORRUPT", 5), ("schema/kind", "KIND_UNSUPPORTED", 7)],
)  # fmt: skip
def test_refusals(kv: Run, path: str, code: str, exit_code: int) -> None:
    ran = kv("import", ROOT / "fixtures" / "cases" / path, "--json")
    assert (ran.code, ran.document["error"]["code"]) == (exit_code, code)


def test_a_receipt_that_is_none_is_mentioned(kv: Run) -> None:
    ran = kv("import", ROOT / "fixtures" / "cases" / "bundle" / "receipts")
    assert ran.code == 0
    assert "left out 1 receipt" in ran.err


def test_nothing_is_overwritten(filled: Run, tmp_path: Path) -> None:
    assert filled("export", "long", "-o", tmp_path, "--json").document["error"]["code"] == "USAGE"


def test_a_run_and_its_report(kv: Run, tmp_path: Path) -> None:
    ran = kv("conformance", "run", "--entrypoint", "self", "--filter", "json/*", "--filter", "canon/*", "--level", "3",
             "--report", tmp_path / "report")  # fmt: skip
    assert ran.code == 0
    assert [line.split()[:2] for line in ran.out.splitlines()] == [["canon", "L3"], ["reader", "L3"]]
    assert parse_receipt((tmp_path / "report" / "report.json").read_bytes()).checks == dict.fromkeys(
        ("canon", "reader"), "verified"
    )
    assert (tmp_path / "report" / "junit.xml").exists()


def test_a_program_that_fails(kv: Run, tmp_path: Path) -> None:
    program = tmp_path / "program"
    described = '{"protocol":1,"name":"x","version":"1","language":"sh","roles":["reader"],"features":[]}'
    program.write_text(f"#!/bin/sh\necho '{described}'\n")
    program.chmod(0o700)
    args = ("conformance", "run", "--entrypoint", program, "--filter", "kinds/kv")
    ran = kv(*args, "--json")
    assert ran.code == 4
    assert ran.document["wrong"][0]["status"] == "error"
    Path(f"{program}.xfails").write_text("kinds/*\n")
    assert kv(*args, "--json").document["totals"] == {"xfailed": 1}
    assert kv(*args[:2], "--entrypoint", "/nowhere", "--json").document["error"]["code"] == "USAGE"
    assert kv(*args[:2], "--entrypoint", "", "--json").document["error"]["code"] == "USAGE"


def test_the_matrix(kv: Run, tmp_path: Path) -> None:
    program = f"{sys.executable} -m kvstore.conformance"
    other = f"{sys.executable} -W ignore -m kvstore.conformance"
    ran = kv("conformance", "run", "--entrypoint", program, "--entrypoint", other, "--filter", "write/kv", "--json",
             "--report", tmp_path / "report")  # fmt: skip
    assert (ran.code, ran.document["totals"], ran.document["grades"]) == (0, {"passed": 4}, {"matrix": "L3"})
    found = {path.name: path for path in (tmp_path / "report").iterdir()}
    assert sorted(found) == ["junit.xml", "report-1-kvstore.json", "report-2-kvstore.json"]
    receipt = parse_receipt(found["report-2-kvstore.json"].read_bytes())
    assert (receipt.checks, receipt.facts["grades"]) == ({"matrix": "verified"}, {"matrix": "L3"})
    assert kv("conformance", "run", "--entrypoint", program, "--entrypoint", other, "--role", "reader").code == 2


def test_list_and_copy(kv: Run, tmp_path: Path) -> None:
    cases = kv("conformance", "list", "--role", "prefix", "--filter", "prefix/count-*", "--json").document["cases"]
    assert {case["role"] for case in cases} == {"prefix"}
    assert len(cases) == 9
    assert "prefix/count-0" in kv("conformance", "list", "--role", "prefix").out
    copied = kv("conformance", "copy", tmp_path / "fixtures", "--json").document
    assert copied["files"] > 1900
    assert kv("conformance", "list", "--fixtures", tmp_path / "fixtures", "--json").document["cases"]
    assert kv("conformance", "copy", tmp_path / "fixtures").code == 2


def test_the_contract_on_the_command_line(kv: Run, tmp_path: Path) -> None:
    """In a process of its own: it reads and writes bytes, and no library of models is imported for it."""
    program = (
        "import sys\nfrom kvstore.cli.main import cli\n"
        "try: cli.main(sys.argv[1:], prog_name='kvstore')\n"
        "except SystemExit as e: code = e.code\n"
        "print([m for m in ('mlx', 'mlx_lm', 'sqlalchemy') if m in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )

    def run(*args: str, data: bytes = b"") -> tuple[int, bytes]:
        command = [sys.executable, "-c", program, "conformance", *args]
        done = subprocess.run(command, input=data, capture_output=True, cwd=ROOT)
        assert done.stderr.decode().splitlines()[-1] == "[]"
        return done.returncode, done.stdout

    assert run("canon", "--as", "json", data=b' {"b": 1, "a": 2}') == (0, b'{"a":2,"b":1}')
    assert run("canon", "--as", "json", data=b"[1.5]")[0] == 1
    context = str(ROOT / "fixtures" / "contexts" / "toy.json")
    assert run("read", "--context", context, str(BUNDLE))[0] == 0
    assert b'"name": "kvstore"' in run("describe")[1]
    assert run("read", "--nonsense")[0] == 2
