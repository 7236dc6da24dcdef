"""The certificate: its rows, and how it is written as JSON and as Markdown."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from cleanba.record import replace_file


class Row(Struct, kw_only=True):
    """The outcome of one setting."""

    layout: str
    updates: int
    seconds: float
    fingerprint: str | None
    """Of the final parameters."""
    episodes: int
    verdict: str
    same: bool
    """Whether the run gave the bits of the reference."""


class Part(Struct, kw_only=True):
    """The outcomes of one configuration."""

    configuration: str
    command: list[str]
    hyperparameters: dict[str, Any]
    versions: dict[str, str]
    device_kind: str | None
    revision: str | None
    layouts: list[Row]
    same: bool


class Certificate(Struct, kw_only=True):
    """What was certified, on which machine, with which outcome."""

    schema_version: int = 1
    name: str
    made: str
    """Time, UTC."""
    seconds: float
    cores: int
    platform: str
    arguments: dict[str, Any]
    configurations: list[Part]
    same: bool

    @property
    def rows(self) -> list[Row]:
        """The rows of all configurations."""
        return [row for part in self.configurations for row in part.layouts]


def as_json(certificate: Certificate) -> str:
    """Return a certificate as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(certificate), indent=1).decode() + "\n"


def read(path: Path) -> Certificate:
    """Read a certificate written as JSON.

    Raises:
      OSError, ValueError: if it cannot be read.
    """
    return msgspec.json.decode(path.read_bytes(), type=Certificate)


def as_markdown(certificate: Certificate) -> str:
    """Return a certificate as a Markdown page."""
    same = sum(row.same for row in certificate.rows)
    first = certificate.configurations[0]
    versions = ", ".join(f"{k} {v}" for k, v in first.versions.items())
    if first.hyperparameters.get("portable"):
        arithmetic = "portable"
    elif certificate.platform == "cpu":
        arithmetic = f"XLA's, with {first.hyperparameters.get('xla_cpu_pool_size')} threads"
    else:
        arithmetic = "XLA's"
    text = [
        "<!-- made by python -m cleanba.audit.certify -->",
        f"# Certificate: {certificate.name}",
        "",
        f"**{same} of {len(certificate.rows)} runs gave the bits of their reference** "
        "(fingerprints of the parameters after every update, episodes, policy-lag records, actions).",
        "",
        f"Made {certificate.made} in {certificate.seconds:,.0f} s on {certificate.cores} "
        f"cores ({first.device_kind}), from revision {first.revision or 'unknown'}. Arithmetic: "
        f"{arithmetic}. Versions: {versions}.",
        "",
        "A layout is named a(actor devices)-l(learner devices)-d(processes)-t(actor threads per actor "
        "device), with -c(cores), -e(EnvPool threads) and -pool(XLA's CPU pool) where these differ from the "
        "default, and with -(processor) where another processor was emulated by QEMU. Every process of a run "
        "is a fresh one.",
    ]
    for part in certificate.configurations:
        text += ["", f"## {part.configuration}", "", f"`{' '.join(part.command)}`", ""]
        text += [
            "| layout | updates | episodes | seconds | final fingerprint | verdict |",
            "| --- | ---: | ---: | ---: | --- | --- |",
        ]
        for row in part.layouts:
            fingerprint = f"`{row.fingerprint[:16]}`" if row.fingerprint else "–"
            text.append(
                f"| {row.layout} | {row.updates} | {row.episodes} | {row.seconds} | "
                f"{fingerprint} | {row.verdict} |"
            )
    return "\n".join(text) + "\n"


def write(certificate: Certificate, folder: Path) -> None:
    """Write `<name>.json` and `<name>.md` into a folder."""
    replace_file(folder / f"{certificate.name}.json", as_json(certificate))
    replace_file(folder / f"{certificate.name}.md", as_markdown(certificate))
