"""Give every row of a table an answer: rows become requests by a template, and come back with columns beside them.

Start a model server, for example `tidegate simulate --port 8001`, then run this with `python examples/rows_with_answers.py`.
MODEL_SERVER_URL names another server. A run that is killed goes on when this is run again, and calls nothing twice.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

REVIEWS = ["The tide table was right to the minute.", "It rained, and the harbour was closed.", "Lovely lighthouse."]
TEMPLATE = {
    "model": "llama-3-8b",
    "messages": [{"role": "user", "content": "Is this review good or bad? {{ review }}"}],
    "max_tokens": 8,
}


def main() -> None:
    with Path("reviews.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["id", "review"], *([number, text] for number, text in enumerate(REVIEWS))])
    Path("template.json").write_text(json.dumps(TEMPLATE))
    server = os.environ.get("MODEL_SERVER_URL", "http://localhost:8001/v1")
    tidegate = Path(sys.executable).with_name("tidegate")
    table = ["reviews.csv", "--template", "template.json", "-o", "rated.csv"]
    subprocess.run([tidegate, "run", *table, "--upstream", server], check=True)
    with Path("rated.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            print(row["id"], row["answer"], row["output_tokens"])
    print("completed: every row has its answer")


if __name__ == "__main__":
    main()
