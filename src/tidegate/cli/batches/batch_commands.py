"""`tidegate batches`: collects its commands under one name."""

from tidegate.cli.batches import batch_control, batch_create, batch_items, batches

app = batches.app
app.command()(batch_create.create)
app.command()(batch_control.pause)
app.command()(batch_control.resume)
app.command()(batch_control.canary)
app.command()(batch_control.retry)
app.command()(batch_items.items)
app.command()(batch_control.delete)
app.command("set")(batch_control.set_batch)
