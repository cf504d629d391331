"""Fits the simulator's unmasking to the measured table: python -m bench.calibrate_unmasking

Writes dlmserve/simulation/data/unmasking.json and prints how well a simulated sample meets the table.
"""

import json
from pathlib import Path

from dlmserve.simulation import unmasking

COLUMNS = {"gsm8k": "tokens_per_step_dual_cache", "harder": "tokens_per_step_harder_text"}
BLOCK_LENGTH = 32
OUTPUT = Path(unmasking.__file__).parent / "data" / "unmasking.json"


def main() -> None:
    calibrations = {
        name: unmasking.fit(unmasking.read_table(column), BLOCK_LENGTH) for name, column in COLUMNS.items()
    }
    entries = {name: calibration.to_json() for name, calibration in calibrations.items()}
    OUTPUT.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    for name, calibration in calibrations.items():
        print(f"{name}: cuts {', '.join(map(str, calibration.cuts))}")


if __name__ == "__main__":
    main()
