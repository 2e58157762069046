"""The paths of the completion-batch API, its scope, and its name."""

PREFIX = "/v1/completion-batch/"
PATH = PREFIX + "{workspace_id}/{environment_id}"
ONE = PATH + "/{completion_batch_id}"
SCOPE = "completion-batch"
# The name of this door in the jobs that it makes.
DOOR = "completion-batch"
