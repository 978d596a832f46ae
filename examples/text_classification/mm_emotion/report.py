"""Prints scikit-learn's report on predictions: `python -m mm_emotion.report predictions.jsonl`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sklearn.metrics import classification_report

from mm_emotion.texts import LABELS


def main() -> None:
    parser = argparse.ArgumentParser(description="scikit-learn's classification_report")
    parser.add_argument("predictions", type=Path, help="file written by `mm eval --predictions`")
    args = parser.parse_args()
    with args.predictions.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    read = [row for row in rows if "error" not in row]
    labels, found = ([row[key] for row in read] for key in ("label", "prediction"))
    different = len({row["row"] for row in rows})
    print(f"{len(rows)} rows, {different} different, {len(rows) - len(read)} unreadable")
    numbers = list(range(len(LABELS)))
    print(classification_report(labels, found, labels=numbers, target_names=LABELS, digits=4))


if __name__ == "__main__":
    main()
