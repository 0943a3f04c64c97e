"""What a certificate proves, and which fast paths have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fastpath import kernels
from tpcompile.errors import ConfigError
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath import certificate, registry
from tpcompile.fastpath.certificate import Certificate, Power, Survivor, Worst
from tpcompile.fastpath.registry import FastPath, fast_path, registered

SURVIVOR = Survivor(place="a.py:1", change="a -> b")
KNOWN = Survivor(place="a.py:2", change="b -> c", reason="changes nothing")


def made(**changes: Any) -> Certificate:
    fields = {
        "name": "norm", "tp": "per_head", "source": "0123", "device": "interpreter", "machine": "x86_64",
        "torch": "2.13.0", "triton": "3.9.0", "command": "tpcompile certify norm", "tp_sizes": (1, 2),
        "dtypes": ("float32",), "num_cases": 4, "worst": Worst(ratio=1.2, case="5 tokens", tensor="output 0"),
        "power": Power(device="interpreter", num_mutations=40, survivors=(KNOWN,)),
    }  # fmt: skip
    return Certificate.model_validate(fields | changes)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastPath:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    fast_path("norm", replaces=kernels.plain, tp="per_head")(kernels.launch)
    line = UserLine(file=str(tmp_path / "mine.py"), line=3, function="launch")
    return replace(registered()["norm"], line=line)


def source(path: FastPath) -> str:
    return path.source.sha256


def test_one_for_the_source_and_kind_of_device_certifies(path: FastPath) -> None:
    file = certificate.write(made(source=source(path)), path)
    assert file.name == "norm.interpreter.json" and certificate.read(file) == made(source=source(path))
    assert certificate.uncertified(path) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"source": "4567"}, "its certificate is for source 4567, and this is "),
        (
            {"worst": Worst(ratio=2.6, case="5 tokens", tensor="output 0")},
            "its certificate has an error of 2.6 times the plain code's in 5 tokens",
        ),
        (
            {"power": Power(device="interpreter", num_mutations=21, survivors=(SURVIVOR, SURVIVOR, KNOWN))},
            "in its certificate 90.0% of 20 mutations caught (1 more change nothing); 95% are asked",
        ),
        ({"power": Power(device="interpreter", num_mutations=0, survivors=())}, "0.0% of 0 mutations"),
    ],
    ids=["edited", "error", "power", "no mutations"],
)
def test_one_that_proves_less_does_not(path: FastPath, changes: dict[str, Any], why: str) -> None:
    certificate.write(made(**{"source": source(path), **changes}), path)
    refusal = certificate.uncertified(path)
    assert refusal.startswith("fast path norm at ") and why in refusal
    assert refusal.endswith("; run `tpcompile certify norm`")


def test_on_a_gpu_one_from_a_gpu_is_asked(path: FastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it has no certificate from a machine; run" in certificate.uncertified(path)
    certificate.write(made(source=source(path)), path)
    monkeypatch.setattr(certificate, "device_kind", lambda: "sm100")
    assert "it has no certificate from a GPU; run" in certificate.uncertified(path)
    certificate.write(made(source=source(path), device="sm90"), path)
    assert certificate.uncertified(path) == ""


def test_what_cases_see_is_known_from_a_machine_without_gpu(path: FastPath) -> None:
    certificate.write(made(source=source(path), device="sm90"), path)
    assert certificate.power_of(path) is None
    certificate.write(made(source="4567"), path)
    assert certificate.power_of(path) is None
    certificate.write(made(source=source(path)), path)
    assert certificate.power_of(path) == made().power


def test_a_damaged_one_is_one_line(path: FastPath) -> None:
    file = certificate.write(made(), path)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no certificate: Field required; remove it, and certify again"):
        certificate.uncertified(path)
