"""The paths of the completion-batch API, its scope, and its name."""

PREFIX = "/v1/completion-batch/"
PATH = PREFIX + "{workspace_id}/{environment_id}"
ONE = PATH + "/{completion_batch_id}"
SCOPE = "completion-batch"
# What jobs that were made here carry.
DOOR = "completion-batch"
