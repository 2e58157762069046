"""`tidegate run`: turns one file into results without a server. After any interruption
the same command goes on.

This module has only the options. The work is loaded when the command runs, so that help and
completion are quick.
"""

import typer

from tidegate.cli.run import run_options as asked
from tidegate.cli.terminal import options


def run(
    files: asked.Files = None,
    upstream: options.UpstreamOption = None,
    output: asked.Output = None,
    named_file: asked.NamedFile = None,
    errors: asked.Errors = None,
    data: options.Data = None,
    config: options.Config = None,
    api_key: options.ApiKey = None,
    in_flight: asked.InFlight = None,
    endpoint: asked.EndpointOption = None,
    template_file: asked.TemplateFile = None,
    ordered: options.Ordered = False,
    prefix_order: asked.PrefixOrder = True,
    invalid_lines: asked.InvalidLinesOption = asked.InvalidLines.FAIL,
    dedupe: asked.DedupeOption = False,
    model: asked.ModelOption = None,
    schema: options.SchemaFile = None,
    field: asked.FieldsOption = None,
    max_cost: asked.MaxCostOption = None,
    max_errors: asked.MaxErrorsOption = None,
    canary: asked.CanaryOption = None,
    retry_failed: asked.RetryFailed = False,
    check: asked.Check = True,
    dry_run: asked.DryRunOption = False,
    fresh: asked.Fresh = False,
    wait: asked.Wait = False,
    as_json: asked.Summary = False,
) -> None:
    """Turn a file of requests into a file of results.

    Each line names its endpoint in its url, and they may differ.
    Interrupt it, kill it, lose power: the same command goes on where it stopped and repeats nothing that was answered.
    Exit codes: 0 all succeeded, 1 some failed, 2 not possible as asked, 130 interrupted.

    Example: tidegate run requests.jsonl --upstream http://localhost:8000/v1 -o results.jsonl
    """
    from tidegate.cli.terminal.loading import http_client_loaded

    with http_client_loaded():
        from tidegate.cli.run import run_file
        from tidegate.cli.terminal.input_file import RunOptions

    names = options.NAMES if upstream else options.NAMES | {"upstream.url": "OPENAI_BASE_URL"}
    upstream, api_key = run_file.named_upstream(upstream, api_key)
    settings = options.loaded(
        config, data, upstream__url=upstream, upstream__api_key=api_key, worker__in_flight_max=in_flight,
        http__connections_max=run_file.connections(in_flight), calls_models=True, names=names,
    ).settings  # fmt: skip
    run_options = RunOptions(
        run_file.checked_endpoint(endpoint),
        ordered,
        prefix_order,
        invalid_lines.value,
        model,
        run_file.answer_terms(schema),
        run_file.controls(max_cost, max_errors),
        run_file.canary(canary),
        dedupe,
    )
    where = options.as_arguments(config, data)
    order = run_file.Order(
        run_file.named_once(files or (), named_file), output, errors, template_file, run_options, field or (),
        fresh, retry_failed, wait, check, dry_run, as_json, where,
    )  # fmt: skip
    raise typer.Exit(run_file.perform(order, settings))
