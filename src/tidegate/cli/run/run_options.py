"""The options that only `tidegate run` has, with their help."""

from enum import StrEnum
from typing import Annotated

import typer


class InvalidLines(StrEnum):
    FAIL = "fail"
    ERROR_FILE = "error_file"


# Several are accepted, so that a pattern without quotes gets a helpful message.
Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="JSONL with one request per line; - reads stdin. s3:// and patterns work, too.",
        show_default=False,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        "--output-file",
        metavar="FILE",
        help="Where results go; - is stdout.",
        show_default="FILE.results.jsonl",
    ),
]
NamedFile = Annotated[
    str | None,
    typer.Option("-i", "--input-file", metavar="FILE", help="Another way to name FILE.", show_default=False),
]
Errors = Annotated[
    str | None,
    typer.Option("--errors", metavar="FILE", help="Where failed lines go.", show_default="beside the results"),
]
InFlight = Annotated[
    int | None,
    typer.Option("--concurrency", "--in-flight", metavar="N", help="Calls in flight at once.", show_default="64"),
]
EndpointOption = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="PATH", help="Which endpoint.", show_default="each line's url"),
]
TemplateFile = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="FILE",
        help="FILE is a table (CSV, JSONL, Parquet): this JSON with {{column}} in it makes each row a request.",
        show_default=False,
    ),
]
PrefixOrder = Annotated[
    bool,
    typer.Option("--prefix-order/--no-prefix-order", help="Send requests that share a prompt's beginning together."),
]
InvalidLinesOption = Annotated[
    InvalidLines, typer.Option("--invalid-lines", help="A bad line fails the run, or goes to the errors file.")
]
DedupeOption = Annotated[
    bool,
    typer.Option("--dedupe", help="Run identical lines once, where chance has no part (temperature 0, embeddings)."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start from the beginning, though the same run exists already.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for a model server that does not answer yet.")]
Summary = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Which model.", show_default="each line's own")
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=VALUE",
        help="defaults, overrides, retry or answers as the API has them, such as retry.attempts_max=5; may be repeated.",
        show_default=False,
    ),
]
MaxCostOption = Annotated[
    str | None,
    typer.Option("--max-cost", metavar="AMOUNT", help="Stop when answers cost more.", show_default=False),
]
MaxErrorsOption = Annotated[
    str | None,
    typer.Option(
        "--max-errors", metavar="N|P%", help="Stop when more lines fail than this.", show_default="the first 20"
    ),
]
CanaryOption = Annotated[
    int | None,
    typer.Option(
        "--canary",
        metavar="N",
        min=1,
        max=1_000_000_000,
        help="Run N lines first; stop if more than a tenth of them fail.",
        show_default=False,
    ),
]
RetryFailed = Annotated[
    bool,
    typer.Option("--retry-failed", help="Run lines that were refused again, too; those that were lost always are."),
]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Ask the server for its models first; stop if all of 20 fail.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what the run would take: errors, tokens, cost, time. Nothing is sent.")
]
